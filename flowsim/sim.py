"""Wires a workload, a policy and a latency model into one run: the Python API."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

from flowsim.cluster import Fleet
from flowsim.core import PolicyError, Request
from flowsim.events import Clock
from flowsim.keep import ALL, Keeper
from flowsim.latency import Exact, LatencyModel, Predictor
from flowsim.log import Log
from flowsim.metrics import Result
from flowsim.policy import Policy, check_is_policy
from flowsim.pool import Cluster, Pool
from flowsim.router import RoundRobin, Router
from flowsim.source import LATEST_S, Arrivals, Source, SourceArrivals

__all__ = ["simulate"]

WATCH_EVERY = 512  # events between two calls of `progress` and `stop`: milliseconds


def simulate(
    requests: Sequence[Request] | Source,
    *,
    policy: Policy,
    latency: LatencyModel,
    predictor: Callable[[LatencyModel], Predictor] = Exact,
    cluster: Cluster | Pool | None = None,
    router: Router | None = None,
    seed: int = 0,
    strict: bool = False,
    horizon_s: float = math.inf,
    warmup_s: float = 0.0,
    cooldown_s: float = 0.0,
    keep: str = ALL,
    progress: Callable[[int, float], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Result:
    """Runs a workload to its end, or to a horizon, and returns what happened.

    Args:
        requests: in order of arrival, `id` being the position; or a source, such as a closed loop.
        policy: one object with `stops` and `select`; every instance asks the same one, but those of pools that have
            their own.
        latency: the hardware of pools without their own; `simulate` binds it to a pool's pass size and its policy's
            stops.
        predictor: makes the policy's and the router's belief about latencies from the bound model.
        cluster: pools of instances and their memory, or one pool on its own; one instance by default.
        router: which instance takes a request; round robin by default. The run uses a copy.
        seed: of the run's own random streams; the workload has its own.
        strict: refuse prompts that drive an operator beyond the range it was measured in.
        horizon_s: stop the clock at this second. Requests that have arrived by then and not finished are
            `unfinished`, and missed; those that would arrive later are no part of the result.
        warmup_s, cooldown_s: requests that arrive in the first or last so many seconds of the arrivals run like all
            others, and are left out of the summary's figures on requests (`measured` is False).
        keep: what the result keeps: `all` tables; the table `requests`; a `sample` of requests with their batches and
            segments; or the `summary` alone, whose figures are of all requests with each (`docs/results.md`).
        progress: called now and then with the number of requests that have ended, and the simulated second.
        stop: asked as often; True ends the run there and then, as a horizon would. `run["partial"]` of its result is
            True.

    Raises:
        ValueError: requests out of order, or with `strict` one beyond the profile's measured range.
        PolicyError: an answer of the policy that the contract of `select` forbids.
    """
    cluster = Cluster.of(cluster or Pool())
    for one in (policy, *(pool.policy or policy for pool in cluster.pools.values())):
        check_is_policy(one)
    _check_run(seed, horizon_s, warmup_s, cooldown_s)
    if not isinstance(requests, Sequence) and not hasattr(requests, "after"):
        raise ValueError(f"requests is a {type(requests).__name__}; it must be a list of requests, or a source")
    if isinstance(requests, Sequence):
        _check_requests(requests)
    began_s = perf_counter()
    env, log = Clock(), Log()
    keeper = Keeper(log, keep, len(requests), seed)
    arrivals = Arrivals(env, requests) if isinstance(requests, Sequence) else SourceArrivals(env, requests)
    fleet = Fleet(
        env,
        cluster,
        router=router or RoundRobin(),
        policy=policy,
        latency=latency,
        predictor=predictor,
        log=log,
        seed=seed,
        ended=arrivals.ended,
        inspect=_check_range if strict else None,
    )
    if strict and isinstance(requests, Sequence) and len(fleet.hardware) == 1:  # before anything runs
        for request in requests:
            _check_range(request, *fleet.hardware.values())
    arrivals.start(fleet.deliver)
    with _collector_at_rest():
        log.events = _run(env, horizon_s, lambda: _watched(env, log, progress, stop))
    ended = len(log.requests)
    fleet.close(horizon_s if horizon_s < env.peek() < math.inf else env.now, drained=env.peek() == math.inf)
    if len(log.requests) != len(arrivals.delivered):
        lost = len(arrivals.delivered) - len(log.requests)
        raise PolicyError(f"{lost} requests were lost: {policy!r} must not change the view that it is given")
    return Result.of(
        arrivals.delivered,
        log,
        fleet.hardware,
        pools=fleet.pools,
        link={"latency_s": cluster.link.latency_s, "bytes_per_s": cluster.link.bytes_per_s},
        kv_blocks=[instance.kv.total_blocks for instance in fleet.instances],
        seed=seed,
        after_horizon=len(requests) - len(arrivals.delivered),
        warmup_s=warmup_s,
        cooldown_s=cooldown_s,
        partial=ended < len(requests) and math.inf > env.peek() <= horizon_s,
        simulation_wall_s=perf_counter() - began_s,
        keeper=keeper,
    )


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Without Python's cycle collector: a run makes no cycles, and walking all its requests costs time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _run(env: Clock, horizon_s: float, enough: Callable[[], bool]) -> int:
    """Steps through all events up to the horizon, or until that is `enough`; returns how many there were."""
    events = 0
    while True:
        done = env.advance(horizon_s, WATCH_EVERY)
        events += done
        if done < WATCH_EVERY or enough():
            return events


def _watched(
    env: Clock,
    log: Log,
    progress: Callable[[int, float], None] | None,
    stop: Callable[[], bool] | None,
) -> bool:
    """Packs the log and tells how far the run is; answers whether it is to stop."""
    log.pack()
    if progress is not None:
        progress(len(log.requests), env.now_s)
    return stop is not None and stop()


def _check_run(seed: int, horizon_s: float, warmup_s: float, cooldown_s: float) -> None:
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed is {seed!r}; it must be a whole number of at least 0")
    if not horizon_s > 0.0:
        raise ValueError(f"horizon_s is {horizon_s}; it must be above 0 (inf to run to the end)")
    for name, value in (("warmup_s", warmup_s), ("cooldown_s", cooldown_s)):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} is {value}; it must be finite and at least 0")


def _check_requests(requests: Sequence[Request]) -> None:
    before_s = 0.0
    for place, request in enumerate(requests):
        if request.id != place:
            raise ValueError(f"request {place} of the workload has id {request.id}; ids must be 0, 1, 2, ... in order")
        if request.arrival_s < before_s:
            raise ValueError(
                f"request {place} arrives at {request.arrival_s} s, before request {place - 1} at {before_s} s; "
                "sort the workload by arrival_s"
            )
        before_s = request.arrival_s
    if before_s > LATEST_S:
        raise ValueError(f"the last request arrives at {before_s:g} s; at most {LATEST_S:g} s keep times exact to 1 ns")


def _check_range(request: Request, latency: LatencyModel) -> None:
    beyond = latency.beyond(request.prompt_tokens)
    if beyond:
        operators = ", ".join(f"{name} ({low} to {high} tokens)" for name, (low, high) in beyond)
        raise ValueError(
            f"strict: request {request.id} has {request.prompt_tokens} prompt tokens, beyond the range in which "
            f"{latency.profile.path} has measured {operators}"
        )
