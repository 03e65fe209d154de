"""Keeps the largest set of requests that can still all be on time: the feasible-set policy and its batching.

At each decision everything that is predicted to make its deadline alone and now is put in the order of deadlines;
whenever the sum of predicted seconds passes a deadline, the piece of work with the most seconds for each request it
would save is given up (J. M. Moore and T. J. Hodgson, Management Science 15, 1968: exact for work that is all here;
new arrivals bring a new decision). The set is served earliest deadline first, all else after it. O(k log k) for the k
pieces of work that can still be on time alone; what is hopeless is never walked.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flowsim.core import Batch, Job, Part
from flowsim.names import unknown
from flowsim.policy import ADMISSIONS, ORDERS, View, decodes_alone, named, slack_edf
from flowsim.queue import Order
from flowsim.timeline import Stops

__all__ = ["FeasibleSet", "JointDeadline", "Planned", "feasible_set", "largest_set"]

NO_WEIGHTS: Mapping[str, float] = {}


class Planned(NamedTuple):
    """A piece of work with the time by which its GPU work must end, its predicted GPU seconds left, and the requests
    that would be on time with it: how many, or their weight."""

    due_s: float
    left_s: float
    saves: float
    work: Job | Batch


@dataclass(frozen=True, slots=True)
class JointDeadline:
    """Waiting prompts join the head, earliest deadline first, as long as every member and everybody passed over
    stays on time, and as long as it saves GPU time.

    Args:
        tokens: of a batch, at most; a longer head runs alone.
        margin_s: predicted seconds that the batch must end before the earliest deadline in it.
        lookahead: how many are looked at behind the head.

    Raises:
        ValueError: `tokens` below 1, `margin_s` or `lookahead` below 0.
    """

    tokens: int = 2048
    margin_s: float = 0.0
    lookahead: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int) or self.tokens < 1 or not self.margin_s >= 0.0 or not self.lookahead >= 0:
            raise ValueError(
                f"JointDeadline(tokens={self.tokens}, margin_s={self.margin_s}, lookahead={self.lookahead}): tokens "
                "must be a whole number of at least 1, margin_s and lookahead at least 0"
            )

    def form(self, head: Job, view: View, order: Order) -> Batch | None:
        """The head and those behind it in an order that can still be on time."""
        if view.running is not None:
            return self.join([_planned_job(head, view)], view)
        behind = (_planned_job(job, view) for job in view.waiting.by(order) if job is not head)
        return self.join([_planned_job(head, view), *_first(behind, self.lookahead)], view)

    def join(self, queue: Sequence[Planned], view: View) -> Batch | None:
        """A batch of the first in the queue and of those behind it; None where the first does not fit."""
        head = queue[0].work
        assert isinstance(head, Job)
        parts = [Part(head, head.left_tokens)]
        if not view.fits(parts):
            return None
        total = head.left_tokens
        if view.running is not None or total >= self.tokens or len(queue) == 1:
            return Batch(parts)
        now_s, request_s = view.now_s, view.request_s
        due_s = queue[0].due_s - self.margin_s  # the batch's: the earliest of its members
        batch_s = queue[0].left_s
        passed_s, spare_s = 0.0, math.inf  # of those passed over: their seconds, the least time to spare
        for planned in queue[1 : self.lookahead + 1]:
            joined = self._joined(parts, total, planned.work, view)
            if joined is not None:
                joined_s = view.cost_s(joined) - request_s
                longer_s = joined_s - batch_s
                earliest_s = min(due_s, planned.due_s - self.margin_s)
                if longer_s <= min(spare_s, planned.left_s) and now_s + joined_s <= earliest_s:
                    parts, batch_s, due_s = joined, joined_s, earliest_s
                    total += joined[-1].tokens
                    spare_s -= longer_s
                    continue
            passed_s += planned.left_s
            spare_s = min(spare_s, planned.due_s - now_s - batch_s - passed_s)
        return Batch(parts)

    def _joined(self, parts: list[Part], total: int, work: Job | Batch, view: View) -> list[Part] | None:
        """The parts and the work's, if it waits, and fits into the tokens and the KV that are left."""
        if isinstance(work, Batch) or total + work.left_tokens > self.tokens:
            return None
        joined = [*parts, Part(work, work.left_tokens)]
        return joined if view.fits(joined) else None


class FeasibleSet:
    """Serves the largest set of requests that can still all be on time, earliest deadline first; the rest after it.

    What has started goes on, though others are due before it, if all of them can wait for its end: they gather, and
    run as one batch then. Of the rest, what has started ends first, so that little is suspended in vain.

    Args:
        batching: who joins the first of the set.
        weights: of SLO classes, 1 unless given: the set then has the largest weight that giving up the most seconds
            per weight first finds, and a class with more weight is given up later.
        stops: where a running batch may be stopped; `Stops` or its name.
        rest: the order of what is not in the set, once the set is empty: a shipped order's name, a function, or the
            dotted path of one.
        consult, admit: as for `ComposedPolicy`.

    Raises:
        ValueError: an unknown name, or a weight that is not above 0.
    """

    def __init__(
        self,
        batching: JointDeadline | None = None,
        stops: Stops | str = "operator",
        weights: Mapping[str, float] | None = None,
        rest: Order | str = "slack_edf",
        consult: str = "events",
        admit: Callable[[View, Job], bool] | str = "all",
    ) -> None:
        if isinstance(stops, str) and stops not in {stop.value for stop in Stops}:
            raise ValueError(unknown("policy.stops", stops, [stop.value for stop in Stops]))
        for name, weight in (weights or {}).items():
            if not 0.0 < weight < math.inf:
                raise ValueError(f"policy.weights.{name} is {weight}; it must be above 0 and finite")
        self.batching = batching or JointDeadline()
        self.weights = dict(weights or {})
        self.stops = Stops(stops)
        self.rest: Order = named(rest, ORDERS, "policy.rest")
        self.consult = consult
        self.admit = named(admit, ADMISSIONS, "policy.admit")

    def select(self, view: View) -> Batch | None:
        queue = feasible_set(view, self.weights)
        going_on = _can_end_first(queue, view)
        if going_on is not None:
            return going_on
        for place, planned in enumerate(queue):
            if isinstance(planned.work, Batch):
                return planned.work
            batch = self.batching.join(queue[place:], view)
            if batch is not None:
                return batch
        return self._of_the_rest(view) or decodes_alone(view)

    def _of_the_rest(self, view: View) -> Batch | None:
        """What nobody in the set is kept waiting for."""
        started = (view.running, view.suspended.first(self.rest))
        held = [batch for batch in started if batch is not None and batch.parts]  # decodes alone are nobody's turn
        if held:
            return min(held, key=lambda batch: self._rank(batch, view))
        head = view.waiting.first(self.rest)
        parts = [Part(head, head.left_tokens)] if head is not None else []
        return Batch(parts) if parts and view.fits(parts) else None

    def _rank(self, work: Job | Batch, view: View) -> tuple[object, bool, int]:
        return self.rest(work, view), work.is_waiting, work.id

    def __repr__(self) -> str:
        return f"FeasibleSet({self.batching}, {self.stops.value})"


def feasible_set(view: View, weights: Mapping[str, float] = NO_WEIGHTS) -> list[Planned]:
    """The largest set of work that can all be on time, in the order of deadlines; ties go to what has started, then
    to the lower id."""
    held = [*view.suspended, *([view.running] if view.running is not None else [])]
    planned = [one for batch in held if (one := _planned_batch(batch, view, weights)) is not None]
    planned.sort(key=lambda one: (one.due_s, one.work.id))
    return largest_set(heapq.merge(planned, _waiting(view, weights), key=_by_deadline), view.now_s)


def _can_end_first(queue: Sequence[Planned], view: View) -> Batch | None:
    """The first started batch of the set, if nobody due before it is late for waiting until its end: the one that
    runs where there is one."""
    end_s, spare_s = view.now_s, math.inf
    for planned in queue:
        batch = planned.work
        if isinstance(batch, Batch) and view.running in (None, batch):
            return batch if 0.0 < planned.left_s <= spare_s else None  # 0: its prediction has run out, and says nothing
        end_s += planned.left_s
        spare_s = min(spare_s, planned.due_s - end_s)
    return None


def largest_set(planned: Iterable[Planned], now_s: float) -> list[Planned]:
    """Of work in the order of deadlines, the largest set that can all be on time, in that order."""
    kept: list[Planned] = []
    worst: list[tuple[float, int, int]] = []  # a heap: most seconds for each request saved first
    dropped: set[int] = set()
    end_s = now_s
    for place, one in enumerate(planned):
        kept.append(one)
        heapq.heappush(worst, (-one.left_s / one.saves, -one.work.id, place))
        end_s += one.left_s
        while worst and end_s > one.due_s:
            place_of_worst = heapq.heappop(worst)[2]
            dropped.add(place_of_worst)
            end_s -= kept[place_of_worst].left_s
    return [one for place, one in enumerate(kept) if place not in dropped] if dropped else kept


def _by_deadline(planned: Planned) -> tuple[float, bool, int]:
    return planned.due_s, planned.work.is_waiting, planned.work.id


def _waiting(view: View, weights: Mapping[str, float]) -> Iterator[Planned]:
    """The waiting jobs that could be on time alone and now, earliest deadline first."""
    now_s, request_s = view.now_s, view.request_s
    for job in view.waiting.by(slack_edf):
        left_s = view.left_s(job)
        if now_s + left_s >= job.deadline_s:
            return
        saves = weights.get(job.request.slo_class, 1.0) if weights else 1.0
        busy_s = max(0.0, left_s - request_s)
        yield Planned(max(job.deadline_s - request_s, now_s + busy_s), busy_s, saves, job)


def _planned_job(job: Job, view: View) -> Planned:
    return Planned(job.deadline_s - view.request_s, view.left_s(job) - view.request_s, 1.0, job)


def _planned_batch(batch: Batch, view: View, weights: Mapping[str, float]) -> Planned | None:
    """A batch that has started, due with the first of its members that can still be on time; None for none."""
    left_s = view.left_s(batch)
    earliest_s = view.now_s + left_s
    on_time = [job for job, _ in batch.parts if job.deadline_s >= earliest_s]
    if not on_time:
        return None
    busy_s = max(0.0, left_s - view.request_s)  # a prediction may be short of what does not even need the GPU
    due_s = max(min(job.deadline_s for job in on_time) - view.request_s, view.now_s + busy_s)
    return Planned(due_s, busy_s, sum(weights.get(job.request.slo_class, 1.0) for job in on_time), batch)


def _first(planned: Iterable[Planned], count: int) -> list[Planned]:
    return [one for one, _ in zip(planned, range(count), strict=False)]
