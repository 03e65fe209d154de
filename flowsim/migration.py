"""Moves what waits on one instance to another: a rule around any router.

Like the routers of `flowsim.router` it knows what a proxy can, and no policy by name; `flowsim.moving` carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from flowsim.core import Job, Request
from flowsim.feasible_routing import Standing
from flowsim.router import Move, RoundRobin, Router, Server

__all__ = ["Migrating"]


class Migrating:
    """Requests go where another router says, and wait there until they start or a better place is free.

    An instance with nothing to do takes the first in the order of `slack_edf` of all that waits on the others (work
    stealing). While none is idle, a request that its own would give up, as not all there can be on time, moves to where
    it is on time and nobody else less (`flowsim.feasible_routing.Standing`). Each instance takes one at a time.

    Args:
        within: where a request goes when it comes; in turn unless given.
    """

    def __init__(self, within: Router | None = None) -> None:
        self.within = within or RoundRobin()

    def route(self, request: Request, servers: Sequence[Server]) -> Server:
        return self.within.route(request, servers)

    def rebalance(self, servers: Sequence[Server], now_s: float) -> Sequence[Move]:
        queued = [server for server in servers if len(server.view.waiting)]
        if not queued:
            return ()
        idle = [server for server in servers if _is_idle(server)]
        return list(_stolen(queued, idle, now_s) if idle else _saved(servers, now_s))


def _is_idle(server: Server) -> bool:
    view = server.view
    return view.running is None and not (len(view.waiting) or len(view.suspended) or view.decoding)


def _stolen(queued: Sequence[Server], idle: Sequence[Server], now_s: float) -> Iterator[Move]:
    """The first of what waits, one for each idle server."""
    ranked = sorted(
        ((_rank(job, server, now_s), job, server) for server in queued for job in _movable(server, now_s)),
        key=lambda one: one[0],
    )
    for target, (_, job, source) in zip(idle, ranked, strict=False):
        yield Move(job, source, target)


def _movable(server: Server, now_s: float) -> Sequence[Job]:
    """What waits there and could start elsewhere: where the GPU is free, all but the one that it can start now."""
    view = server.view
    jobs = [job for job in view.waiting if not _has_started(job)]
    if view.running is None and not len(view.suspended):
        jobs = sorted(jobs, key=lambda job: _rank(job, server, now_s))[1:]
    return jobs


def _rank(job: Job, server: Server, now_s: float) -> tuple[bool, float, int]:
    """The place in `slack_edf`, as of now: a server's view is as of its last decision."""
    late = now_s >= job.deadline_s - server.view.left_s(job)
    return late, -job.deadline_s if late else job.deadline_s, job.id


def _has_started(job: Job) -> bool:
    return not math.isnan(job.start_s)


def _saved(servers: Sequence[Server], now_s: float) -> Iterator[Move]:
    """What its own instance gives up, to the one that would have it on time; each takes one."""
    standings = [Standing(server, now_s) for server in servers]
    takers = list(standings)
    for source in standings:
        for job in _given_up(source):
            losses = [(taker.loss(job), taker) for taker in takers if taker is not source]
            if not losses:
                break
            lost, taker = min(losses, key=lambda one: one[0])
            if lost[0] < 0:
                takers.remove(taker)
                yield Move(job, source.server, taker.server)


def _given_up(standing: Standing) -> Sequence[Job]:
    """What waits there and could be on time alone, but not with the others."""
    kept = {planned.work.id for planned in standing.kept}
    left_out = [planned.work for planned in standing.possible if planned.work.id not in kept]
    return [job for job in left_out if isinstance(job, Job) and not _has_started(job)]
