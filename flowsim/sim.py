"""Wires a workload, a policy and a latency model into one run: the Python API."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import NormalDist
from time import perf_counter

import numpy as np
import simpy

from flowsim.cluster import Arrivals, PrefillOnly, RoundRobin, Router
from flowsim.core import Request
from flowsim.instance import Instance
from flowsim.kv import KVPool, pool_blocks
from flowsim.latency import Exact, LatencyModel, Predictor
from flowsim.log import Log
from flowsim.metrics import Result
from flowsim.policy import Policy

__all__ = ["simulate"]

PROGRESS_EVERY = 512  # requests between two calls of `progress`


def simulate(
    requests: Sequence[Request],
    *,
    policy: Policy,
    latency: LatencyModel,
    predictor: Callable[[LatencyModel], Predictor] = Exact,
    cluster: PrefillOnly | None = None,
    router: Router | None = None,
    seed: int = 0,
    strict: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Runs a workload to its end and returns what happened.

    Args:
        requests: in order of arrival, `id` being the position.
        policy: one object with `stops` and `select`; every instance asks the same one.
        latency: the hardware; `simulate` binds it to the cluster's pass size and the policy's stops.
        predictor: makes the policy's belief about latencies from the bound model.
        cluster: instances and their memory; one instance by default.
        router: which instance takes a request; round robin by default.
        seed: of the run's own random streams; the workload has its own.
        strict: refuse prompts that drive an operator beyond the range it was measured in.
        progress: called now and then with the number of requests that have ended.

    Raises:
        ValueError: requests out of order, or with `strict` one beyond the profile's measured range.
        PolicyError: an answer of the policy that the contract of `select` forbids.
    """
    cluster = cluster or PrefillOnly()
    router = router or RoundRobin()
    bound = latency.bound(pass_tokens=cluster.pass_tokens, stops=policy.stops)
    _check_requests(requests)
    if strict:
        _check_range(requests, bound)
    began_s = perf_counter()
    env, log = simpy.Environment(), Log()
    count = _Count(progress)
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
            ended=count.ended,
        )
        for index in range(cluster.instances)
    ]
    Arrivals(env, requests, lambda request: router.route(request, instances).submit(request))
    while env.peek() != float("inf"):
        env.step()
        log.events += 1
    return Result.of(
        requests,
        log,
        bound,
        kv_blocks=[instance.kv.total_blocks for instance in instances],
        idles=bool(getattr(policy, "idles", False)),
        seed=seed,
        simulation_wall_s=perf_counter() - began_s,
    )


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
    """Counts requests that have ended, and tells `progress` every so often."""

    def __init__(self, progress: Callable[[int], None] | None) -> None:
        self.count = 0
        self.progress = progress

    def ended(self, _request: Request, _finish_s: float) -> None:
        self.count += 1
        if self.progress is not None and self.count % PROGRESS_EVERY == 0:
            self.progress(self.count)


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


def _check_range(requests: Sequence[Request], latency: LatencyModel) -> None:
    for request in requests:
        beyond = latency.beyond(request.prompt_tokens)
        if beyond:
            operators = ", ".join(f"{name} ({low} to {high} tokens)" for name, (low, high) in beyond)
            raise ValueError(
                f"strict: request {request.id} has {request.prompt_tokens} prompt tokens, beyond the range in which "
                f"{latency.profile.path} has measured {operators}"
            )
