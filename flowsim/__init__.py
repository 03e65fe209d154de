"""flowsim: a discrete-event simulator for research on prefill scheduling in LLM serving."""

from flowsim.batching import Alone, Everyone, SLOAware, TokenBudget
from flowsim.core import Batch, Job, Part, PolicyError, Request
from flowsim.latency import LatencyModel
from flowsim.metrics import Result
from flowsim.policy import ComposedPolicy, Policy, Polling, View
from flowsim.pool import Cluster, Pool, PrefillOnly
from flowsim.profile import Profile, load_profile
from flowsim.sim import simulate
from flowsim.timeline import Stops
from flowsim.workload import load_trace

__all__ = [
    "Alone",
    "Batch",
    "Cluster",
    "ComposedPolicy",
    "Everyone",
    "Job",
    "LatencyModel",
    "Part",
    "Policy",
    "PolicyError",
    "Polling",
    "Pool",
    "PrefillOnly",
    "Profile",
    "Request",
    "Result",
    "SLOAware",
    "Stops",
    "TokenBudget",
    "View",
    "load_profile",
    "load_trace",
    "simulate",
]

__version__ = "0.1.0"
