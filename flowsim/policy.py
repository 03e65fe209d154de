"""Who runs now: the policy interface, and the shipped orders and batchings that compose into policies.

A policy looks at a View and answers; it changes nothing, keeps no time and knows no simulator. To write your
own, give any class `stops` and `select` (README, "Your own policy").
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from flowsim.core import Batch, Job, Part
from flowsim.markup import table
from flowsim.names import unknown
from flowsim.queue import JobQueue, Order, indexed
from flowsim.timeline import INSTANT_S, Stops

__all__ = [
    "ComposedPolicy", "InteractiveFirst", "Pauses", "Policy", "Polling", "View",
    "arrival", "check_is_policy", "deadline", "decodes_alone", "hopeless", "shortest", "slack_edf", "suspended_at_most",
]  # fmt: skip

Work = Job | Batch


class Pauses(NamedTuple):
    """What stops of a batch cost and give: seconds that its checks take in all, and mean seconds from a flag at a
    random moment to the stop."""

    checks_s: float
    wait_s: float


class View(Protocol):
    """Read-only: what the scheduler of a real engine could know. `flowsim.view.InstanceView` documents each."""

    @property
    def now_s(self) -> float: ...
    @property
    def waiting(self) -> JobQueue[Job]: ...
    @property
    def suspended(self) -> JobQueue[Batch]: ...
    @property
    def running(self) -> Batch | None: ...
    @property
    def decoding(self) -> Sequence[Job]: ...
    @property
    def request_s(self) -> float: ...
    @property
    def evicted(self) -> bool: ...
    @property
    def layers(self) -> int: ...
    @property
    def arrived(self) -> Sequence[Job]: ...
    def left_tokens(self, job: Job) -> int: ...
    def left_s(self, work: Work) -> float: ...
    def cost_s(self, parts: Sequence[Part], decodes: Sequence[Job] = (), layers: range | None = None) -> float: ...
    def fits(self, parts: Sequence[Part], decodes: Sequence[Job] = ()) -> bool: ...
    def pauses(self, parts: Sequence[Part], stops: Stops) -> Pauses: ...


class Policy(Protocol):
    """All that the executor knows of a policy.

    `select` answers the running batch, a suspended one, a new batch of waiting jobs, or None to run nothing.
    It is asked on every arrival and completion, also while a batch runs: another answer than `view.running`
    then means "stop at the next legal stop", where it is asked again, and the second answer is what runs. It
    must be pure, and must not answer None while the GPU is free and something suspended, or every waiting job,
    could run. `stops` are those of batches that have none of their own (`Batch.stops`), and predicted times include
    their checks. `consult`, `idles` and `admit` are read once where a policy has them.
    """

    @property
    def stops(self) -> Stops: ...
    def select(self, view: View) -> Batch | None: ...


def check_is_policy(given: object) -> None:
    """Refuses what is none.

    Raises:
        ValueError: it has no `stops` or no `select`, or is the class of a policy.
    """
    has_both = isinstance(getattr(given, "stops", None), Stops) and callable(getattr(given, "select", None))
    if isinstance(given, str):
        hint = "; for a shipped one: flowsim.config.build(compose(['policy=NAME'])).policy"
    else:
        hint = f"; give an object of the class: {given.__name__}(...)" if isinstance(given, type) else ""
    if hint or not has_both:
        raise ValueError(f"{given!r:.80} is no policy: it needs `stops`, a member of Stops, and `select(view)`{hint}")


class Batching(Protocol):
    """Who joins the waiting job `head`: a batch, None where it cannot start now, or the running batch to let it
    be. While a batch runs, the answer only needs to say whether it should stop, and for whom."""

    def form(self, head: Job, view: View, order: Order) -> Batch | None: ...


@indexed()
def arrival(work: Work, _view: View) -> float:
    """First come, first served."""
    return work.arrival_s


@indexed(flips_s=lambda work, view: work.deadline_s - view.left_s(work))
def slack_edf(work: Work, view: View) -> tuple[bool, float]:
    """Earliest deadline first; work that can no longer meet its deadline goes last, latest deadline first.

    FlowPrefill's priority sgn(slack) / deadline (arXiv 2602.16603), where slack 0 counts as negative.
    """
    deadline_s = work.deadline_s
    return (True, -deadline_s) if view.now_s >= deadline_s - view.left_s(work) else (False, deadline_s)


@indexed()
def deadline(work: Work, _view: View) -> float:
    """Earliest deadline first, whether or not it can still be met."""
    return work.deadline_s


@indexed()
def shortest(work: Work, view: View) -> float:
    """Fewest predicted seconds left first."""
    return view.left_s(work)


@dataclass(frozen=True)
class InteractiveFirst:
    """Requests with a TTFT SLO of at most `within_s` seconds before all others, each kind first come first served."""

    within_s: float = 1.0

    def __call__(self, work: Work, _view: View) -> tuple[bool, float]:
        return work.slo_s > self.within_s, work.arrival_s

    def flips_s(self, _work: Work, _view: View) -> float:
        """Never: keys stand still."""
        return math.inf


def suspended_at_most(limit_s: float, order: Order) -> Order:
    """An order in which a batch that has been suspended for `limit_s` in all precedes everything else, the one
    that runs first, then the one that reached the limit first; below the limit it is `order`."""

    def reached_s(work: Work) -> float:
        if work.is_waiting:
            return math.inf
        assert isinstance(work, Batch)
        if math.isnan(work.suspended_at_s):  # it runs
            return -math.inf if work.suspended_s >= limit_s - INSTANT_S else math.inf
        return work.suspended_at_s + limit_s - work.suspended_s

    def bounded(work: Work, view: View) -> tuple[bool, Any]:
        at_s = reached_s(work)
        return (False, at_s) if view.now_s >= at_s else (True, order(work, view))

    def flips_s(work: Work, view: View) -> float:
        later_s = [at_s for at_s in (reached_s(work), order.flips_s(work, view)) if at_s > view.now_s]  # type: ignore[attr-defined]
        return min(later_s, default=math.inf)

    return indexed(flips_s)(bounded) if hasattr(order, "flips_s") else bounded


def hopeless(view: View, job: Job) -> bool:
    """Admission that refuses what cannot meet its TTFT SLO even alone and now."""
    return view.now_s + view.left_s(job) <= job.deadline_s


SHORTEST_PERIOD_S = 1e-6


@dataclass(frozen=True, slots=True)
class Polling:
    """Consult a policy at completions, and while work exists at multiples of a period: arrivals wait for the next.

    Raises:
        ValueError: a period below a microsecond.
    """

    period_s: float = 0.01

    def __post_init__(self) -> None:
        if not SHORTEST_PERIOD_S <= self.period_s < math.inf:
            raise ValueError(f"Polling(period_s={self.period_s}): the period must be at least {SHORTEST_PERIOD_S:g} s")


def decodes_alone(view: View) -> Batch | None:
    """What decodes, if nothing else is to run: it takes a token's time, and ends for whatever comes."""
    if view.running is not None:
        return view.running
    decoding = view.decoding
    return Batch((), decoding) if decoding else None


class ComposedPolicy:
    """A policy made of one answer to each question: who first, with whom, where may it stop, when are we asked.

    Args:
        order: who should run now: a shipped order's name, a function, or the dotted path of one.
        batching: who runs together (`flowsim.batching`).
        stops: where a running batch may be stopped; `Stops` or its name.
        consult: when `select` is asked: `events` (arrivals and completions), `stops` (at each legal stop, so that
            nothing ever blocks), or `Polling(period_s)`.
        admit: `all`, `hopeless` (refuse what cannot meet its SLO even alone and now), or a function
            `admit(view, job) -> bool`, asked once on arrival.
        max_suspend_s: a batch that has been suspended for this long in all runs before anything else, and is not
            paused again. inf: never, as FlowPrefill does.

    Raises:
        ValueError: an unknown name (near names and all choices are given), or `max_suspend_s` below 0.
    """

    def __init__(
        self,
        order: Order | str,
        batching: Batching,
        stops: Stops | str,
        consult: str | Polling = "events",
        admit: Callable[[View, Job], bool] | str = "all",
        max_suspend_s: float = math.inf,
    ) -> None:
        if not max_suspend_s >= 0.0:
            raise ValueError(f"policy.max_suspend_s is {max_suspend_s}; it must be at least 0 (inf for no bound)")
        if not isinstance(consult, Polling) and consult not in CONSULTS:
            raise ValueError(unknown("policy.consult", consult, CONSULTS) + ", or flowsim.policy.Polling")
        if not callable(getattr(batching, "form", None)):
            raise ValueError(f"policy.batching is {batching!r:.60}; it must be one of flowsim.batching, or have `form`")
        self.order: Order = named(order, ORDERS, "policy.order")
        if max_suspend_s < math.inf:
            self.order = suspended_at_most(max_suspend_s, self.order)
        self.batching = batching
        self.stops = stops if isinstance(stops, Stops) else _stops(stops)
        self.consult = consult
        self.admit = named(admit, ADMISSIONS, "policy.admit")
        self.max_suspend_s = max_suspend_s

    def select(self, view: View) -> Batch | None:
        order, running = self.order, view.running
        held = view.suspended.front(order)  # the first of the running and the suspended batches
        if running is not None and running.parts:  # decodes alone are nobody's turn
            own = (order(running, view), running.id, running)
            held = own if held is None else min(own, held)
        if held is None:
            head = view.waiting.first(order)
            return (None if head is None else self.batching.form(head, view, order)) or decodes_alone(view)
        front = view.waiting.front(order)
        if front is None or held[0] <= front[0]:  # ties go to what has started before what waits
            return held[2]
        return self.batching.form(front[2], view, order) or held[2]

    def __repr__(self) -> str:
        order = getattr(self.order, "__name__", self.order)
        return f"ComposedPolicy({order}, {self.batching}, {self.stops.value}, consult={self.consult})"

    def _repr_html_(self) -> str:
        return table(
            "ComposedPolicy",
            [
                ("who runs first", getattr(self.order, "__name__", self.order)),
                ("who runs together", self.batching),
                ("may stop at", self.stops.value),
                ("is asked at", self.consult),
                ("admits", getattr(self.admit, "__name__", "all")),
                ("may be suspended for [s]", self.max_suspend_s),
            ],
        )


CONSULTS = ("events", "stops")
ORDERS: dict[str, Order] = {
    "arrival": arrival,
    "deadline": deadline,
    "slack_edf": slack_edf,
    "shortest": shortest,
    "interactive_first": InteractiveFirst(),
}
ADMISSIONS: dict[str, Callable[[View, Job], bool] | None] = {"all": None, "hopeless": hopeless}


def named(given: Callable[..., Any] | str, shipped: dict[str, Any], kind: str) -> Any:
    """A function given as itself, by a shipped name, or by the dotted path ``package.module.function``."""
    if isinstance(given, str) and given in shipped:
        return shipped[given]
    found: Any = given
    if isinstance(given, str):
        module, _, name = given.rpartition(".")
        if not module:
            raise ValueError(unknown(kind, given, shipped) + f"; or the dotted path of your own {kind}")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{kind} {given!r} cannot be imported: {error}") from error
    try:
        inspect.signature(found).bind(None, None)
    except (TypeError, ValueError):
        raise ValueError(
            f"{kind} is {given!r:.60}; it must be a function of two arguments (work or job, and the view)"
        ) from None
    return found


def _stops(name: str) -> Stops:
    try:
        return Stops(name)
    except ValueError:
        raise ValueError(unknown("policy.stops", name, [stop.value for stop in Stops])) from None
