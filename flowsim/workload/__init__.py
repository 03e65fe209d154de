"""Workloads: arrival processes, lengths, SLOs and trace readers; each answers a list of requests.

Nothing here may know policies, latencies or the simulator.
"""

from flowsim.workload.closed_loop import ClosedLoop, closed_loop
from flowsim.workload.define import workload
from flowsim.workload.export import describe, write_trace
from flowsim.workload.rows import Rows
from flowsim.workload.sessions import sessions
from flowsim.workload.stress import stress_mixed
from flowsim.workload.synthetic import lognormal, mixed, quantiles, uniform
from flowsim.workload.trace import load_trace, read_trace, trace

__all__ = [
    "ClosedLoop",
    "Rows",
    "closed_loop",
    "describe",
    "load_trace",
    "lognormal",
    "mixed",
    "quantiles",
    "read_trace",
    "sessions",
    "stress_mixed",
    "trace",
    "uniform",
    "workload",
    "write_trace",
]
