"""Workloads: arrival processes, lengths, SLOs and trace readers; each answers a list of requests.

Nothing here may know policies, latencies or the simulator.
"""

from flowsim.workload.synthetic import mixed, uniform
from flowsim.workload.trace import load_trace, read_trace, trace

__all__ = ["load_trace", "mixed", "read_trace", "trace", "uniform"]
