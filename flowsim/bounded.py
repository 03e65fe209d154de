"""The bound of a whole set-up: which set-ups `flowsim.bound` can judge, and what of them it is given.

Knows configurations and clusters; no simulator, no study.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from flowsim.bound import Bound, on_time_bound
from flowsim.config import Setup
from flowsim.core import Request
from flowsim.latency import LatencyModel
from flowsim.pool import Cluster, Pool

__all__ = ["bound_of", "checked_boundable", "measured"]


def bound_of(setup: Setup, requests: Sequence[Request], batching: str) -> Bound:
    """How many of some of a set-up's requests any schedule could serve within their TTFT SLO on its hardware.

    It is about TTFT: what the pools do after a first token takes no time from it, nor do KV memory and failures, so
    that with decoding beside prefills the bound is looser, and still a bound.

    Raises:
        ValueError: as `checked_boundable`.
    """
    latency, instances = checked_boundable(setup)
    return on_time_bound(requests, latency, instances=instances, batching=batching)


def checked_boundable(setup: Setup) -> tuple[LatencyModel, int]:
    """The hardware that prefills, and how many instances of it there are.

    Raises:
        ValueError: a closed loop, whose arrivals depend on the schedule; pools of different hardware to prefill in;
            ranks whose speeds are drawn, or prompts found in a prefix cache, which may take less than the profile
            says.
    """
    if not isinstance(setup.requests, Sequence):
        raise _refused("a closed loop: its arrivals depend on the schedule; give it a fixed workload")
    pool = _prefilling(setup)
    if pool.jitter_sigma:
        raise _refused("cluster.jitter_sigma, with which a rank may be faster than the profile; set it to 0")
    if pool.prefix_cache and any(request.prefix_hashes for request in setup.requests):
        raise _refused("prompts that a prefix cache may spare; set cluster.prefix_cache=false")
    stops = (pool.policy or setup.policy).stops  # which do not change a bound
    return pool.hardware(setup.latency).bound(pass_tokens=pool.pass_tokens, stops=stops), pool.instances


def measured(setup: Setup) -> list[Request]:
    """The requests that the figures of its summary are over: those that arrive before the horizon, and neither in the
    warm-up nor in the cool-down."""
    assert isinstance(setup.requests, Sequence)
    arrival_s = np.array([request.arrival_s for request in setup.requests])
    arrival_s = arrival_s[arrival_s <= setup.horizon_s]
    last_s = arrival_s.max(initial=0.0) - setup.cooldown_s
    inside = np.flatnonzero((arrival_s >= setup.warmup_s) & (arrival_s <= last_s))
    return [setup.requests[place] for place in inside.tolist()]


def without_ttft(requests: Sequence[Request]) -> int:
    """How many have an SLO, but none on TTFT."""
    return sum(one.ttft_slo_s == math.inf and one.tbt_slo_s < math.inf for one in requests)


def _prefilling(setup: Setup) -> Pool:
    """The one pool that requests are sent to."""
    cluster = Cluster.of(setup.cluster)
    names = [name for name in cluster.pools if name not in cluster.decoding]
    if len(names) > 1:
        raise _refused(f"the pools {', '.join(names)}: requests must go to one pool of equal instances")
    return cluster.pools[names[0]]


def _refused(what: str) -> ValueError:
    return ValueError(f"there is no bound (task=bound, task.bound=true) of {what}")
