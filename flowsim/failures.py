"""Instances that stop for a while and lose what their GPUs hold. Knows no policy and no router."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import simpy

from flowsim.core import Job
from flowsim.instance import Instance
from flowsim.log import Ended, Log
from flowsim.pool import Failure
from flowsim.proxied import Proxied
from flowsim.record import segment_row

__all__ = ["Outages"]


class Outages:
    """The failures of one pool.

    Args:
        env: the simulation's clock.
        log: gets a row for each failure.
        servers: the pool's instances, as the proxy knows them.
        lost: called with the jobs of an instance that has stopped, in the order of their arrival.
        back: called when an instance is up again.
    """

    def __init__(
        self,
        env: simpy.Environment,
        log: Log,
        servers: Sequence[Proxied],
        lost: Callable[[Sequence[Job]], None],
        back: Callable[[], None],
    ) -> None:
        self._env = env
        self._log = log
        self._servers = servers
        self._lost = lost
        self._back = back

    def plan(self, failure: Failure) -> None:
        """Lets it happen when it is due."""
        timer = simpy.Timeout(self._env, failure.at_s)
        timer.callbacks.append(lambda _: self._fail(self._servers[failure.instance], failure.for_s))

    def _fail(self, server: Proxied, for_s: float) -> None:
        now_s = self._env.now
        server.is_up = False
        self._log.failures.add((server.index, now_s, now_s + for_s))
        jobs = evacuated(server.instance)
        for job in jobs:
            server.left(job.request)
        server.renew()
        self._lost(jobs)
        simpy.Timeout(self._env, for_s).callbacks.append(lambda _: self._recover(server))

    def _recover(self, server: Proxied) -> None:
        server.is_up = True
        self._back()


def evacuated(instance: Instance) -> list[Job]:
    """Stops an instance where it is. Its jobs, in the order of their arrival, with nothing computed:
    `recomputed_tokens` counts what has to be computed anew, the tokens of batches under way among it."""
    now_s, view = instance.env.now, instance.view
    running = instance.halt()
    under_way = [*view.suspended] if running is None else [running, *view.suspended]
    if running is not None and running.since_s < now_s:
        instance.log.segments.add(segment_row(instance.index, running, now_s, running.operators, Ended.FAILED))
    jobs = {job.id: job for job in view.waiting}
    for batch in under_way:
        for job, new in batch.parts:
            jobs[job.id] = job
            job.recomputed_tokens += new
            if batch is not running:
                job.suspended_s += now_s - batch.suspended_at_s
    for job in list(view.waiting):
        view.waiting.remove(job)
    for batch in list(view.suspended):
        view.suspended.remove(batch)
    for job in jobs.values():
        job.recomputed_tokens += job.done_tokens - job.cached_tokens
        job.done_tokens = job.cached_tokens = 0
        job.requeued += 1
    instance.log.kv.add((now_s, instance.index, instance.kv.total_blocks, 0))
    return sorted(jobs.values(), key=lambda job: job.id)
