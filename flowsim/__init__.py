"""flowsim: a discrete-event simulator for research on prefill scheduling in LLM serving."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from flowsim.study import compare, goodput, slo_scale, sweep

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
    "compare",
    "goodput",
    "load_profile",
    "load_trace",
    "simulate",
    "slo_scale",
    "sweep",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The studies, imported when first used: they bring Hydra and joblib."""
    if name not in ("compare", "goodput", "slo_scale", "sweep"):
        raise AttributeError(f"module 'flowsim' has no attribute {name!r}")
    from flowsim import study

    return getattr(study, name)
