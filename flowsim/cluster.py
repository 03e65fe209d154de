"""The running cluster: instances in their pools, and the proxy that sends requests to them.

Knows SimPy; knows no policy and no router by name.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np

from flowsim.core import Job, Outcome, Request
from flowsim.decoding import DecodingStage
from flowsim.events import Clock
from flowsim.failures import Outages, requeued
from flowsim.instance import Instance
from flowsim.kv import Blocks, KVPool, PrefixPool, pool_blocks
from flowsim.latency import LatencyModel, Predictor
from flowsim.link import Handover, Transfers
from flowsim.lockstep import Lockstep
from flowsim.log import Log
from flowsim.moving import Moving
from flowsim.policy import Policy, Polling
from flowsim.pool import HERE, Cluster, Pool
from flowsim.proxied import Proxied
from flowsim.router import Rebalancer, Router, Server
from flowsim.stage import PrefillStage, Stage

__all__ = ["Fleet"]


class Fleet:
    """The instances of all pools, behind one router.

    Args:
        env: the simulation's clock.
        cluster: the pools.
        router: decides which instance takes a request; a copy of it, so that each run starts alike.
        policy: of pools without their own.
        latency: the run's hardware, of pools without their own.
        predictor: makes what policies and router believe of a pool's hardware.
        log: where everything is written.
        seed: of the ranks' jitter.
        ended: called with each request and the second at which it ended.
        inspect: called with each request and the hardware that it is sent to, to raise where that may not be.

    Raises:
        ValueError: a pool whose model does not fit its GPUs, or which the router names and nobody has.
    """

    def __init__(
        self,
        env: Clock,
        cluster: Cluster,
        *,
        router: Router,
        policy: Policy,
        latency: LatencyModel,
        predictor: Callable[[LatencyModel], Predictor],
        log: Log,
        seed: int,
        ended: Callable[[Request, float], None],
        inspect: Callable[[Request, LatencyModel], None] | None = None,
    ) -> None:
        self.hardware: dict[str, LatencyModel] = {}  # of each pool, bound to its passes and stops
        self.pools: dict[str, dict[str, Any]] = {}  # as `run.json` has them
        self._env = env
        self._log = log
        self._seed = seed
        self._ended = ended
        self._inspect = inspect
        self._router = copy.deepcopy(router)
        self._moving: Moving | None = None
        if isinstance(self._router, Rebalancer):
            self._moving = Moving(env, self._router, log, lambda: self._live)
        self._handover = copy.deepcopy(cluster.handover)
        self._servers: dict[str, list[Proxied]] = {name: [] for name in cluster.pools}
        self._transfers = Transfers(env, cluster.link, log)
        self._held: list[Job] = []  # while no instance is up
        self._entry: list[Proxied] = []
        self._live: list[Proxied] = []  # of them, those that are up
        self._up: dict[str, list[Proxied]] = {}  # likewise, of each pool; all of them while none is
        for name, pool in cluster.pools.items():
            own = pool.policy or policy
            hardware = pool.hardware(latency).bound(pass_tokens=pool.pass_tokens, stops=own.stops)
            self.hardware[name] = hardware
            self.pools[name] = described(sum(map(len, self._servers.values())), pool, own, hardware)
            self._build(name, pool, cluster.decoding, own, hardware, predictor)
        for name, pool in cluster.pools.items():
            if pool.decode not in (None, HERE):
                held = self._servers[str(pool.decode)][0].instance.kv
                for server in self._servers[name]:
                    server.most_tokens = held.total_blocks * held.block_tokens
        entries = [name for name in cluster.pools if name not in cluster.decoding]
        self._entry = [server for name in entries for server in self._servers[name]]
        self._live = self._entry
        self._up = dict(self._servers)
        check = getattr(router, "check_pools", None)
        if check is not None:
            check(entries)
        elif cluster.tracks:
            raise ValueError(
                f"the pools {', '.join(entries)} are for different requests, between which {type(router).__name__} "
                "does not choose: use router=two_track, or cluster.tracks=false to spread all requests over them"
            )

    def _build(
        self,
        name: str,
        pool: Pool,
        decoding: frozenset[str],
        policy: Policy,
        latency: LatencyModel,
        predictor: Callable[[LatencyModel], Predictor],
    ) -> None:
        decodes = pool.decode == HERE or name in decoding
        single_steps = pool.async_steps > 0 or pool.expert_parallel
        group = self._group(pool, latency)
        first = self.pools[name]["instances"][0]
        for index in range(first, first + pool.instances):
            believed = predictor(latency)
            server = Proxied(self._env, index, name, believed)
            server.stands_for(
                partial(
                    Instance,
                    self._env,
                    index,
                    policy=policy,
                    latency=latency,
                    predictor=believed,
                    log=self._log,
                    max_batches=pool.max_batches,
                    max_sequences=pool.max_sequences or math.inf,
                    stage=partial(DecodingStage, most_steps=1 if single_steps else None)
                    if decodes
                    else self._prefill_stage(server, pool.decode),
                    group=group,
                    async_steps=pool.async_steps,
                    slowest=slowest_rank(pool.jitter_sigma, latency.tp, self._seed, index),
                    prefilled=server.prefilled,
                    ended=self._leaving(server, pulls=name in decoding),
                    memory=partial(kv_pool, pool, latency),
                )
            )
            self._servers[name].append(server)
        outages = Outages(self._env, self._log, self._servers[name], self._lost, self._back)
        for failure in pool.outages:
            outages.plan(failure)

    def _group(self, pool: Pool, latency: LatencyModel) -> Lockstep | None:
        """The clock of a pool whose instances step together."""
        if not pool.expert_parallel:
            return None
        assert pool.collective is not None
        link = (pool.collective.latency_s, pool.collective.bytes_per_s)
        return Lockstep(self._env, lambda own, tokens: latency.exchange_s(own, tokens, link))

    def _prefill_stage(self, server: Proxied, decode: str | None) -> Callable[[Instance], Stage]:
        """Prefills whose requests end with their first token, or go on to an instance of the pool `decode`."""
        if decode is None:
            return PrefillStage

        def handed(job: Job) -> None:
            server.left(job.request)
            self._hand_over(job, server.instance, decode, self._env.now)

        return lambda instance: PrefillStage(instance, handed)

    def _hand_over(self, job: Job, source: Instance, decode: str, asked_s: float) -> None:
        """A prefill that ended at `asked_s` is to be decoded by an instance of the pool `decode`."""
        target = self._chosen(self._handover, job.request, self._up[decode])
        target.requests += 1
        self._transfers.ask(job, source, target.instance, asked_s)

    def _leaving(self, server: Proxied, *, pulls: bool) -> Callable[[Request, float], None]:
        def ended(request: Request, finish_s: float) -> None:
            server.left(request)
            if pulls:
                self._transfers.pull(server.instance)
            if self._moving is not None:
                self._moving.changed()
            self._ended(request, finish_s)

        return ended

    def deliver(self, request: Request) -> None:
        """A request reaches the proxy: it goes where the router says; while no instance is up the proxy keeps it.

        Raises:
            ValueError: the router answered something else than one of the servers.
        """
        if not self._live:
            self._held.append(Job(request))
            return
        server = self._chosen(self._router, request, self._live)
        if self._inspect is not None:
            self._inspect(request, self.hardware[server.pool])
        if self._moving is not None:
            self._moving.changed()
        server.submit(request)

    def _changed(self) -> None:
        """Something came or ended: what waits may be better off elsewhere."""
        if self._moving is not None:
            self._moving.changed()

    def _lost(self, server: Proxied, jobs: Sequence[Job]) -> None:
        """An instance is down; its jobs, and those whose KV was on its way from there, start anew on others, in the
        order of their arrival. What was to be decoded there is handed over again."""
        self._count_up(server.pool)
        gone, kept = self._transfers.fail(server.index)
        for handover in gone:
            requeued(handover.job)
            self._server(handover.target).left(handover.job.request)
        self._hand_over_again(kept)
        jobs = sorted([*jobs, *(handover.job for handover in gone)], key=lambda job: job.id)
        if not self._live:
            self._held += jobs
            return
        self._changed()
        for job in jobs:
            self._chosen(self._router, job.request, self._live).take_over(job)

    def _hand_over_again(self, handovers: Sequence[Handover]) -> None:
        for one in handovers:
            server = self._server(one.target)
            server.left(one.job.request)
            self._hand_over(one.job, one.source, server.pool, one.asked_s)

    def _server(self, instance: Instance) -> Proxied:
        return next(
            server for servers in self._servers.values() for server in servers if server.index == instance.index
        )

    def _count_up(self, pool: str) -> None:
        """Notes which instances are up, after one of a pool stopped or came back."""
        self._live = [server for server in self._entry if server.is_up]
        self._up[pool] = [server for server in self._servers[pool] if server.is_up] or self._servers[pool]

    def _back(self, server: Proxied) -> None:
        """An instance is up again; what the proxy kept goes out, and what was to go to its pool goes there."""
        self._count_up(server.pool)
        self._hand_over_again(self._transfers.resume(server.index, {one.index for one in self._servers[server.pool]}))
        held, self._held = (self._held, []) if self._live else ([], self._held)
        self._changed()
        for job in held:
            server = self._chosen(self._router, job.request, self._live)
            if job.requeued:
                server.take_over(job)
            else:
                server.submit(job.request)

    @property
    def instances(self) -> list[Instance]:
        """Those of all pools, in the order of their numbers."""
        return [server.instance for servers in self._servers.values() for server in servers]

    def _chosen(self, router: Router, request: Request, servers: Sequence[Proxied]) -> Proxied:
        server: Server = router.route(request, servers)
        if isinstance(server, Proxied):
            return server
        name = type(router).__name__
        raise ValueError(f"{name}.route answered {server!r:.60}; it must be one of the servers that it was given")

    def close(self, now_s: float, *, drained: bool) -> None:
        """The run is over; `drained`: nothing more would happen."""
        for instance in self.instances:
            instance.close(now_s, drained=drained)
        self._transfers.close()
        for job in self._held:
            self.instances[0].log_request(job, math.nan, Outcome.UNFINISHED)


def described(first: int, pool: Pool, policy: Policy, latency: LatencyModel) -> dict[str, Any]:
    """A pool as `run.json` has it; its instances are numbered from `first`."""
    return {
        "instances": [first, first + pool.instances - 1],
        "gpu": latency.profile.gpu,
        "tp": latency.tp,
        "stops": latency.stops.value,
        "pass_tokens": latency.pass_tokens,
        "block_tokens": pool.block_tokens,
        "request_s": latency.profile.request_s,
        "decode": pool.decode,
        "idles": pool.expert_parallel  # a rank waits for the others
        or bool(getattr(policy, "idles", False))
        or isinstance(getattr(policy, "consult", None), Polling),
    }


def kv_pool(pool: Pool, latency: LatencyModel) -> Blocks:
    """The KV blocks of one instance of a pool."""
    profile = latency.profile
    blocks = pool.kv_blocks or pool_blocks(
        gpu_memory_bytes=profile.gpu_memory_bytes,
        weights_bytes=profile.weights_bytes,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        block_tokens=pool.block_tokens,
        gpu_memory_fraction=pool.gpu_memory_fraction,
        tp=latency.tp,
    )
    return (PrefixPool if pool.prefix_cache else KVPool)(blocks, pool.block_tokens)


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
