"""Routing by feasible sets: a request goes where the most requests can still all be on time with it.

A router like those of `flowsim.router`; it looks into the queues of the instances, as `slack_aware` does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flowsim.core import Batch, Job, Request
from flowsim.feasible import Planned, largest_set
from flowsim.policy import slack_edf
from flowsim.router import LeastWork, Server

__all__ = ["FeasibleRouting", "Standing"]


class FeasibleRouting:
    """The instance whose feasible set gains most by the request; among equals the one that ends it first in the order
    of deadlines, then the lowest index. Without an SLO: least work.

    O(k log k) for the k requests of an instance that can still be on time.
    """

    def route(self, request: Request, servers: Sequence[Server]) -> Server:
        if request.ttft_slo_s == math.inf:
            return LeastWork().route(request, servers)
        job = Job(request)
        standings = [Standing(server, request.arrival_s) for server in servers]
        return min(standings, key=lambda standing: standing.loss(job)).server


class Standing:
    """What can still be on time on one instance at one time: `possible` alone, earliest deadline first, and `kept`
    together."""

    def __init__(self, server: Server, now_s: float) -> None:
        self.server = server
        self.now_s = now_s
        self.possible = _possible(server, now_s)
        self.kept = largest_set(self.possible, now_s)

    def loss(self, job: Job) -> tuple[int, float, int]:
        """Requests that would no longer be on time with this one more (-1: none, and it would be), then when its
        prefill would end, counted from now, then the instance's index."""
        server = self.server
        request_s = server.view.request_s
        own_s = max(0.0, server.predicted_s(job.prompt_tokens) - request_s)
        own = Planned(job.deadline_s - request_s, own_s, 1.0, job)
        after = len(largest_set(sorted([*self.possible, own], key=_by_deadline), self.now_s))
        ends_s = own.left_s + sum(one.left_s for one in self.possible if one.due_s <= own.due_s)
        return len(self.kept) - after, ends_s, server.index


def _possible(server: Server, now_s: float) -> list[Planned]:
    """What can still be on time there alone, earliest deadline first; the view's own clock may be behind."""
    view = server.view
    request_s = view.request_s
    found: list[Planned] = []
    running = view.running
    for batch in view.suspended:
        _add(found, batch, max(0.0, batch.predicted_s - request_s - batch.done_s), request_s, now_s)
    if running is not None:
        ran_s = running.done_s + max(0.0, now_s - running.since_s)
        _add(found, running, max(0.0, running.predicted_s - request_s - ran_s), request_s, now_s)
    for job in view.waiting.by(slack_edf):
        left_s = view.left_s(job)
        if view.now_s + left_s >= job.deadline_s:
            break  # and so are all behind it
        _add(found, job, max(0.0, left_s - request_s), request_s, now_s)
    return sorted(found, key=_by_deadline)


def _add(found: list[Planned], work: Job | Batch, left_s: float, request_s: float, now_s: float) -> None:
    due_s = work.deadline_s - request_s
    if now_s + left_s <= due_s:
        found.append(Planned(due_s, left_s, 1.0, work))


def _by_deadline(planned: Planned) -> tuple[float, int]:
    return planned.due_s, planned.work.id
