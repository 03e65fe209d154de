"""How many requests any schedule could serve on time: an upper bound, to hold policies against.

The relaxation is clairvoyant preemptive scheduling: every arrival is known, pausing costs nothing and KV memory has
no end. Knows requests and latencies; no policy, no simulator, no clock.

The largest number of on-time jobs on one preemptive machine is a classic problem, 1 | r_j, pmtn | sum U_j, solved
exactly in O(n^5) by E. L. Lawler, "A dynamic programming algorithm for preemptive scheduling of a single machine to
minimize the number of late jobs", Annals of Operations Research 26 (1990). For thousands of requests the same
problem is written here as a linear program with one number 0 <= x_j <= 1 for each request: a set of jobs can all be
on time if and only if no interval asks for more work than it has time (the demand criterion of preemptive EDF),

    sum of p_j x_j over the jobs that arrive and are due within [r, d]  <=  instances * (d - r).

Of these O(n^2) inequalities few matter: they are added as EDF, run on the fractions of the last solution, finds them
broken. Every relaxation on the way is an upper bound as well. With integral x the answer is Lawler's.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from flowsim.core import Request
from flowsim.latency import LatencyModel
from flowsim.names import unknown
from flowsim.timeline import Stops

__all__ = ["BATCHINGS", "SOLUTIONS", "Bound", "goodput_bound", "least_busy_s", "on_time_bound"]

Floats = npt.NDArray[np.float64]
ROUNDING_S = 1e-7  # deadlines are this much later here, and an interval is broken by more than this
ROUNDING = 1e-3  # what HiGHS's tolerances may take from the sum of all x
ROWS_FROM_ONE_ARRIVAL = 4  # of the broken intervals that begin together, so many are added in a round
MAX_ROUNDS = 200
SETTLED = 1e-5  # of all requests: a round that lowers a relaxed bound by less is the last


@dataclass(frozen=True, slots=True)
class Bound:
    """At most `on_time` of `requests` (those with a TTFT SLO) can be on time; `wall_s` real seconds to find out.

    `impossible` of them are late even alone on an idle instance. `load` is the least GPU seconds of all requests over
    the seconds from first to last arrival, of all instances; None where these are the same moment.
    """

    batching: str
    solution: str
    instances: int
    requests: int
    on_time: int
    impossible: int
    load: float | None
    rounds: int
    intervals: int
    wall_s: float

    @property
    def attainment(self) -> float | None:
        """The highest share of requests with an SLO that any schedule could serve on time."""
        return self.on_time / self.requests if self.requests else None


def on_time_bound(
    requests: Sequence[Request],
    latency: LatencyModel,
    *,
    instances: int = 1,
    batching: str = "perfect",
    solution: str = "relaxed",
    enough: float = 0.0,
) -> Bound:
    """How many requests any schedule could serve within their TTFT SLO.

    Args:
        requests: a workload; those without a TTFT SLO are ignored (they can always wait).
        latency: the hardware; its pass size counts, its stops do not.
        instances: identical ones. A request may move between them freely, but never runs on two at once.
        batching: `alone`: schedules that run each request alone, its whole prompt; `perfect`: all schedules whatever,
            each token at the rate of the best batch there is (`least_busy_s`).
        solution: `relaxed`: the linear program; `whole`: integral, exact for one instance and slow beyond some
            hundreds of requests.
        enough: stop once the bound is below this share of the requests; for searches.

    Raises:
        ValueError: an unknown batching or solution, or `instances` below 1.
    """
    if batching not in BATCHINGS:
        raise ValueError(unknown("batching", batching, BATCHINGS))
    if solution not in SOLUTIONS:
        raise ValueError(unknown("solution", solution, SOLUTIONS))
    if instances < 1:
        raise ValueError(f"instances is {instances}; it must be at least 1")
    began_s = perf_counter()
    having_slo = [request for request in requests if request.ttft_slo_s < math.inf]
    request_s = latency.profile.request_s
    arrival_s = np.array([request.arrival_s for request in having_slo], dtype=np.float64)
    due_s = arrival_s + np.array([request.ttft_slo_s for request in having_slo], dtype=np.float64)
    due_s += ROUNDING_S - request_s
    busy_s = least_busy_s([request.prompt_tokens for request in having_slo], latency, batching)
    possible = busy_s <= due_s - arrival_s
    program = _Program(arrival_s[possible], due_s[possible], busy_s[possible], instances)
    on_time = program.solve(SOLUTIONS[solution], enough * len(having_slo), SETTLED * len(having_slo))
    span_s = float(arrival_s[-1] - arrival_s[0]) if len(arrival_s) else 0.0
    return Bound(
        batching=batching,
        solution=solution,
        instances=instances,
        requests=len(having_slo),
        on_time=on_time,
        impossible=int((~possible).sum()),
        load=float(busy_s.sum()) / (span_s * instances) if span_s else None,
        rounds=program.rounds,
        intervals=len(program.intervals),
        wall_s=perf_counter() - began_s,
    )


def goodput_bound(
    workload: Callable[[float], Sequence[Request]],
    latency: LatencyModel,
    *,
    target: float = 0.9,
    instances: int = 1,
    batching: str = "perfect",
    start_rps: float = 8.0,
    tolerance: float = 0.005,
) -> float:
    """The highest rate, in requests per second, at which some schedule might still serve `target` of all on time.

    Args:
        workload: the requests at a rate; with common random numbers, as `flowsim.workload.mixed` has them.
        latency, instances, batching: as for `on_time_bound`.
        target: share of requests, above 0 and at most 1.
        start_rps: where the search begins.
        tolerance: relative width of the last bracket, whose upper end is the answer: no rate above it can do.

    Raises:
        ValueError: `target` or `start_rps` out of range, or a workload in which no rate reaches the target.
    """
    if not (0.0 < target <= 1.0 and 0.0 < start_rps < math.inf):
        raise ValueError(f"target is {target} and start_rps {start_rps}; 0 < target <= 1 and start_rps > 0")

    def reaches(rate_rps: float) -> bool:
        bound = on_time_bound(workload(rate_rps), latency, instances=instances, batching=batching, enough=target)
        return bound.attainment is not None and bound.attainment >= target

    low_rps = high_rps = start_rps
    while reaches(high_rps):
        low_rps, high_rps = high_rps, 1.25 * high_rps
    while not reaches(low_rps):
        low_rps, high_rps = low_rps / 1.25, low_rps
        if low_rps < 1e-3 * start_rps:
            raise ValueError(f"no schedule serves {target:.0%} of this workload on time, however low its rate")
    while high_rps / low_rps > 1.0 + tolerance:
        middle_rps = math.sqrt(low_rps * high_rps)
        low_rps, high_rps = (middle_rps, high_rps) if reaches(middle_rps) else (low_rps, middle_rps)
    return high_rps


# ---------------------------------------------------------------- the least seconds that a prompt needs


def least_busy_s(prompt_tokens: Sequence[int], latency: LatencyModel, batching: str) -> Floats:
    """GPU seconds that no schedule of the kind can spare on each prompt; no checks, switches or barriers.

    `alone`: the whole prompt as one batch. `perfect`: a pass of n new tokens takes at least n times the least seconds
    per token that a pass of any size does, attention's square apart; and attention of a prompt of c tokens,
    however cut and batched, at least min(cc, cp / 2) c^2 a layer (cut in two at k, cc (k^2 + (c - k)^2) +
    cp k (c - k) is no less).
    """
    model = latency.bound(pass_tokens=latency.pass_tokens, stops=Stops.REQUEST)
    if batching == "alone":
        return np.array([model.whole(tokens).total_s for tokens in prompt_tokens], dtype=np.float64)
    attention, layers = model.profile.attention[model.tp], model.profile.layers
    square_s = layers * attention.cc_s
    token_s = min(
        (model.timeline([(tokens, 0)]).total_s - square_s * tokens * tokens) / tokens
        for tokens in range(1, model.pass_tokens + 1)
    )
    tokens = np.array(prompt_tokens, dtype=np.float64)
    least: Floats = token_s * tokens + layers * min(attention.cc_s, attention.cp_s / 2.0) * tokens * tokens
    return least


# ---------------------------------------------------------------- the linear program


class _Program:
    """Which jobs to take, over the intervals found so far."""

    def __init__(self, arrival_s: Floats, due_s: Floats, busy_s: Floats, instances: int) -> None:
        self.arrival_s = arrival_s
        self.due_s = due_s
        self.busy_s = busy_s
        self.instances = instances
        self.intervals: set[tuple[float, float]] = set()
        self.rounds = 0
        self._jobs = _Jobs(arrival_s, due_s)

    def solve(self, solver: Solver, enough: float, settled: float) -> int:
        """The bound, once no interval is broken, the rest does not matter, or it is below `enough`."""
        taken: Floats = np.ones(len(self.busy_s))
        bound = float(len(taken))
        while self.rounds < MAX_ROUNDS and self._add(taken):
            self.rounds += 1
            taken = solver(self._rows(), self._room_s(), len(taken))
            lowered, bound = bound - taken.sum(), min(bound, float(taken.sum()))
            if bound + ROUNDING < enough or (solver is _relaxed and self.rounds > 1 and lowered < settled):
                break
        return math.floor(bound + ROUNDING)

    def _add(self, taken: Floats) -> bool:
        """Adds intervals that ask for more than they have time; False where there is none."""
        found = self._jobs.broken(self.busy_s * taken / self.instances)
        found.sort(reverse=True)
        per_arrival: dict[float, int] = {}
        before = len(self.intervals)
        for _, from_s, to_s in found:
            per_arrival[from_s] = per_arrival.get(from_s, 0) + 1
            if per_arrival[from_s] <= ROWS_FROM_ONE_ARRIVAL:
                self.intervals.add((from_s, to_s))
        return len(self.intervals) > before

    def _rows(self) -> Any:
        """Seconds of each job (columns) inside each interval (rows)."""
        from scipy.sparse import csr_matrix

        inside = [np.flatnonzero((self.arrival_s >= a) & (self.due_s <= b)) for a, b in sorted(self.intervals)]
        columns = np.concatenate(inside)
        begins = np.cumsum([0, *map(len, inside)])
        return csr_matrix((self.busy_s[columns], columns, begins), shape=(len(inside), len(self.busy_s)))

    def _room_s(self) -> Floats:
        return np.array([self.instances * (b - a) for a, b in sorted(self.intervals)])


class _Jobs:
    """Finds intervals with too much work in them, by preemptive EDF on one machine."""

    def __init__(self, arrival_s: Floats, due_s: Floats) -> None:
        order = np.argsort(arrival_s, kind="stable")
        self._order = order
        self._arrival_s: list[float] = arrival_s[order].tolist()
        self._due_s: list[float] = due_s[order].tolist()

    def broken(self, work_s: Floats) -> list[tuple[float, float, float]]:
        """(seconds too many, begin, end) for each deadline that EDF misses: from the last moment before it at which
        the machine was idle or did what is due later, all work is due by then and does not fit."""
        found: list[tuple[float, float, float]] = []
        ready: list[tuple[float, float]] = []  # a heap of (deadline, seconds left)
        later = _LaterWork()
        now_s = -math.inf
        for place, work in enumerate(work_s[self._order].tolist()):
            arrival_s = self._arrival_s[place]
            self._run(ready, now_s, arrival_s, later, found)
            now_s = arrival_s
            if work > 0.0:
                heapq.heappush(ready, (self._due_s[place], work))
        self._run(ready, now_s, math.inf, later, found)
        return found

    @staticmethod
    def _run(
        ready: list[tuple[float, float]],
        now_s: float,
        until_s: float,
        later: _LaterWork,
        found: list[tuple[float, float, float]],
    ) -> None:
        """Works from now to the next arrival, earliest deadline first."""
        while ready and now_s < until_s:
            due_s, left_s = ready[0]
            end_s = now_s + left_s
            if end_s > until_s:
                heapq.heapreplace(ready, (due_s, end_s - until_s))
                later.until(due_s, until_s)
                return
            heapq.heappop(ready)
            later.until(due_s, end_s)
            now_s = end_s
            if end_s > due_s + ROUNDING_S:
                found.append((end_s - due_s, later.last_s(due_s), due_s))
        if not ready:
            later.until(math.inf, until_s)  # idle


class _LaterWork:
    """Until when the machine last did something due after a given time; idling counts as due never."""

    def __init__(self) -> None:
        self._due_s: list[float] = [-math.inf]  # negated, rising: the later the deadline, the earlier in the list
        self._until_s: list[float] = [-math.inf]

    def until(self, due_s: float, until_s: float) -> None:
        """It did something due at `due_s` until `until_s`: older work due no later matters no more."""
        while self._due_s and -self._due_s[-1] <= due_s:
            self._due_s.pop()
            self._until_s.pop()
        self._due_s.append(-due_s)
        self._until_s.append(until_s)

    def last_s(self, due_s: float) -> float:
        """Until when it last did something due after `due_s`."""
        return self._until_s[bisect_left(self._due_s, -due_s) - 1]


Solver = Callable[[Any, Floats, int], Floats]


def _relaxed(rows: Any, room_s: Floats, jobs: int) -> Floats:
    from scipy.optimize import linprog

    answer = linprog(-np.ones(jobs), A_ub=rows, b_ub=room_s, bounds=(0.0, 1.0), method="highs")
    return np.asarray(answer.x, dtype=np.float64)


def _whole(rows: Any, room_s: Floats, jobs: int) -> Floats:
    from scipy.optimize import Bounds, LinearConstraint, milp

    limits = LinearConstraint(rows, -np.inf, room_s)
    answer = milp(
        -np.ones(jobs), integrality=np.ones(jobs, dtype=np.int64), bounds=Bounds(0.0, 1.0), constraints=limits
    )
    found = np.asarray(answer.x, dtype=np.float64)
    return np.asarray(np.rint(found), dtype=np.float64)


SOLUTIONS: dict[str, Solver] = {"relaxed": _relaxed, "whole": _whole}
BATCHINGS = ("alone", "perfect")
