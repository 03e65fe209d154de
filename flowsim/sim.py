"""Wires a workload, a policy and a latency model into one run: the Python API."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from statistics import NormalDist
from time import perf_counter

import numpy as np
import simpy

from flowsim.cluster import Arrivals, PrefillOnly, RoundRobin, Router, Source, SourceArrivals
from flowsim.core import PolicyError, Request
from flowsim.instance import Instance
from flowsim.kv import KVPool, pool_blocks
from flowsim.latency import Exact, LatencyModel, Predictor
from flowsim.log import Log
from flowsim.metrics import Result
from flowsim.policy import Policy, Polling
from flowsim.timeline import Stops

__all__ = ["simulate"]

LATEST_S = 1e7  # a float of seconds this large still tells nanoseconds apart
PROGRESS_EVERY = 512  # requests between two calls of `progress`
PACK_EVERY = 512  # events between two packings of the log


def simulate(
    requests: Sequence[Request] | Source,
    *,
    policy: Policy,
    latency: LatencyModel,
    predictor: Callable[[LatencyModel], Predictor] = Exact,
    cluster: PrefillOnly | None = None,
    router: Router | None = None,
    seed: int = 0,
    strict: bool = False,
    horizon_s: float = math.inf,
    warmup_s: float = 0.0,
    cooldown_s: float = 0.0,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Runs a workload to its end, or to a horizon, and returns what happened.

    Args:
        requests: in order of arrival, `id` being the position; or a source, such as a closed loop.
        policy: one object with `stops` and `select`; every instance asks the same one.
        latency: the hardware; `simulate` binds it to the cluster's pass size and the policy's stops.
        predictor: makes the policy's belief about latencies from the bound model.
        cluster: instances and their memory; one instance by default.
        router: which instance takes a request; round robin by default.
        seed: of the run's own random streams; the workload has its own.
        strict: refuse prompts that drive an operator beyond the range it was measured in.
        horizon_s: stop the clock at this second. Requests that have arrived by then and not finished are
            `unfinished`, and missed; those that would arrive later are no part of the result.
        warmup_s, cooldown_s: requests that arrive in the first or last so many seconds of the arrivals run like all
            others, and are left out of the summary's figures on requests (`measured` is False).
        progress: called now and then with the number of requests that have ended.

    Raises:
        ValueError: requests out of order, or with `strict` one beyond the profile's measured range.
        PolicyError: an answer of the policy that the contract of `select` forbids.
    """
    cluster = cluster or PrefillOnly()
    router = router or RoundRobin()
    _check_run(policy, seed, horizon_s, warmup_s, cooldown_s)
    bound = latency.bound(pass_tokens=cluster.pass_tokens, stops=policy.stops)
    if not isinstance(requests, Sequence) and not hasattr(requests, "after"):
        raise ValueError(f"requests is a {type(requests).__name__}; it must be a list of requests, or a source")
    if isinstance(requests, Sequence):
        _check_requests(requests)
        if strict:
            for request in requests:
                _check_range(request, bound)
    began_s = perf_counter()
    env, log = simpy.Environment(), Log()
    counter = _Count(progress)
    instances = [
        Instance(
            env,
            index,
            policy=policy,
            latency=bound,
            predictor=predictor(bound),
            kv=_pool(cluster, bound),
            log=log,
            max_batches=cluster.max_batches,
            slowest=slowest_rank(cluster.jitter_sigma, bound.tp, seed, index),
            ended=counter.ended,
        )
        for index in range(cluster.instances)
    ]

    def deliver(request: Request) -> None:
        if request.arrival_s > LATEST_S:
            raise ValueError(
                f"request {request.id} arrives at {request.arrival_s:g} s; the clock ends at {LATEST_S:g} s"
            )
        if strict:
            _check_range(request, bound)
        router.route(request, instances).submit(request)

    if isinstance(requests, Sequence):
        counter.arrivals = Arrivals(env, requests, deliver)
    else:
        counter.arrivals = SourceArrivals(env, requests, deliver)
    with _collector_at_rest():
        _run(env, horizon_s, log)
    for instance in instances:
        instance.close(min(horizon_s, env.now), drained=env.peek() == math.inf)
    if len(log.requests) != len(counter.arrivals.delivered):
        lost = len(counter.arrivals.delivered) - len(log.requests)
        raise PolicyError(f"{lost} requests were lost: {policy!r} must not change the view that it is given")
    return Result.of(
        counter.arrivals.delivered,
        log,
        bound,
        kv_blocks=[instance.kv.total_blocks for instance in instances],
        idles=bool(getattr(policy, "idles", False)) or isinstance(getattr(policy, "consult", None), Polling),
        seed=seed,
        after_horizon=len(requests) - len(counter.arrivals.delivered),
        warmup_s=warmup_s,
        cooldown_s=cooldown_s,
        simulation_wall_s=perf_counter() - began_s,
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


def _run(env: simpy.Environment, horizon_s: float, log: Log) -> None:
    """Steps through all events up to the horizon and counts them; now and then packs the log."""
    ends = horizon_s < math.inf
    with suppress(simpy.core.EmptySchedule):
        for log.events in count():
            if ends and env.peek() > horizon_s:
                break
            env.step()
            if not log.events % PACK_EVERY:
                log.pack()


def _check_run(policy: Policy, seed: int, horizon_s: float, warmup_s: float, cooldown_s: float) -> None:
    if not isinstance(getattr(policy, "stops", None), Stops) or not callable(getattr(policy, "select", None)):
        hint = "; for a shipped one: flowsim.config.build(compose(['policy=NAME'])).policy" * isinstance(policy, str)
        raise ValueError(f"{policy!r:.80} is no policy: it needs `stops`, a member of Stops, and `select(view)`{hint}")
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed is {seed!r}; it must be a whole number of at least 0")
    if not horizon_s > 0.0:
        raise ValueError(f"horizon_s is {horizon_s}; it must be above 0 (inf to run to the end)")
    for name, value in (("warmup_s", warmup_s), ("cooldown_s", cooldown_s)):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} is {value}; it must be finite and at least 0")


def slowest_rank(sigma: float, ranks: int, seed: int, instance: int) -> Callable[[], float]:
    """Draws the largest of `ranks` factors exp(sigma z), z standard normal, in closed form.

    The largest of r draws is below x with probability F(x) ** r, so one uniform number u gives it: z is the
    normal quantile of u ** (1 / r). Each instance has a stream of its own, apart from the workload's.
    """
    if sigma == 0.0:
        return lambda: 1.0
    stream = random.Random(np.random.SeedSequence(seed, spawn_key=(1, instance)).generate_state(4).tobytes())
    quantile = NormalDist().inv_cdf
    return lambda: math.exp(sigma * quantile((1.0 - stream.random()) ** (1.0 / ranks) * (1.0 - 1e-12)))


class _Count:
    """Counts requests that have ended, tells `progress` every so often, and the arrivals each time."""

    arrivals: Arrivals | SourceArrivals

    def __init__(self, progress: Callable[[int], None] | None) -> None:
        self.count = 0
        self.progress = progress

    def ended(self, request: Request, finish_s: float) -> None:
        self.count += 1
        if self.progress is not None and self.count % PROGRESS_EVERY == 0:
            self.progress(self.count)
        self.arrivals.ended(request, finish_s)


def _pool(cluster: PrefillOnly, latency: LatencyModel) -> KVPool:
    profile = latency.profile
    blocks = cluster.kv_blocks or pool_blocks(
        gpu_memory_bytes=profile.gpu_memory_bytes,
        weights_bytes=profile.weights_bytes,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        block_tokens=cluster.block_tokens,
        gpu_memory_fraction=cluster.gpu_memory_fraction,
        tp=latency.tp,
    )
    return KVPool(blocks, cluster.block_tokens)


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
