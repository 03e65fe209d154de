"""Instances that stop for a while and lose what their GPUs hold. Knows no policy and no router."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import simpy

from flowsim.core import Batch, Job
from flowsim.instance import Instance
from flowsim.log import Ended, Log
from flowsim.pool import Failure
from flowsim.proxied import Proxied
from flowsim.record import held_by, segment_row
from flowsim.timeline import Iterations, Stops

__all__ = ["Outages", "requeued"]


class Outages:
    """The failures of one pool.

    Args:
        env: the simulation's clock.
        log: gets a row for each failure.
        servers: the pool's instances, as the proxy knows them.
        lost: called with an instance that has stopped, made anew, and the jobs that it had.
        back: called with an instance that is up again.
    """

    def __init__(
        self,
        env: simpy.Environment,
        log: Log,
        servers: Sequence[Proxied],
        lost: Callable[[Proxied, Sequence[Job]], None],
        back: Callable[[Proxied], None],
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
        self._lost(server, jobs)
        simpy.Timeout(self._env, for_s).callbacks.append(lambda _: self._recover(server))

    def _recover(self, server: Proxied) -> None:
        server.is_up = True
        self._back(server)


def evacuated(instance: Instance) -> list[Job]:
    """Stops an instance where it is. Its jobs have lost their KV: `recomputed_tokens` counts what has to be computed
    anew, the tokens of batches under way among it."""
    now_s, view, stage = instance.env.now, instance.view, instance.stage
    running, planned = instance.halt()
    if running is not None:
        _give_out(instance, running, now_s)
        if running.since_s < now_s:
            instance.log.segments.add(segment_row(instance.index, running, now_s, running.operators, Ended.FAILED))
    jobs = {job.id: job for job in (*view.waiting, *stage.under_way())}
    for batch in view.suspended:
        for job, _ in batch.parts:
            job.suspended_s += now_s - batch.suspended_at_s
    for batch in (running, planned, *view.suspended):
        if batch is not None:
            stage.lose(batch)
            jobs |= {job.id: job for job in held_by(batch)}
    for job in jobs.values():
        stage.leave(job)
        requeued(job)
    for waiting in list(view.waiting):
        view.waiting.remove(waiting)
    for batch in list(view.suspended):
        view.suspended.remove(batch)
    view.decodes.clear()
    instance.log.kv.add((now_s, instance.index, instance.kv.total_blocks, 0))
    return list(jobs.values())


def requeued(job: Job) -> None:
    """A job whose KV went with an instance is to be prefilled anew."""
    job.lose_kv()
    job.requeued += 1


def _give_out(instance: Instance, running: Batch, now_s: float) -> None:
    """The tokens of the steps that a run of decodes has ended are out; its last step is lost."""
    timeline = running.timeline
    if not isinstance(timeline, Iterations):
        return
    begun = timeline.next_stop(now_s - running.since_s, Stops.PASS).operators // timeline.operators
    if begun < 2:
        return
    operators = (begun - 1) * timeline.operators
    instance.view.now_s = running.since_s + timeline.at(operators, Stops.PASS)
    instance.log.segments.add(segment_row(instance.index, running, instance.view.now_s, operators, Ended.PASS))
    instance.stage.end(running, operators)
    running.operators, running.since_s, running.switch_s = operators, instance.view.now_s, 0.0
