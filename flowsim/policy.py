"""Who runs now: the policy interface, and the shipped orders and batchings that compose into policies.

A policy looks at a View and answers; it changes nothing, keeps no time and knows no simulator. To write your
own, give any class `stops` and `select` (README, "Your own policy").
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from flowsim.core import Batch, Job, Part
from flowsim.names import unknown
from flowsim.queue import JobQueue, Order, indexed
from flowsim.timeline import Stops

__all__ = ["Alone", "ComposedPolicy", "Policy", "SLOAware", "TokenBudget", "View", "arrival", "slack_edf"]

Work = Job | Batch


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
    def left_s(self, work: Work) -> float: ...
    def cost_s(self, parts: Sequence[Part], decodes: Sequence[Job] = ()) -> float: ...
    def fits(self, parts: Sequence[Part]) -> bool: ...


class Policy(Protocol):
    """All that the executor knows of a policy.

    `select` answers the running batch, a suspended one, a new batch of waiting jobs, or None to run nothing.
    It is asked on every arrival and completion, also while a batch runs: another answer than `view.running`
    then means "stop at the next legal stop", where it is asked again, and the second answer is what runs. It
    must be pure, and must not answer None while the GPU is free and something suspended, or every waiting job,
    could run. `consult`, `idles` and `admit` are read once where a policy has them.
    """

    @property
    def stops(self) -> Stops: ...
    def select(self, view: View) -> Batch | None: ...


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
    hopeless = view.now_s >= work.deadline_s - view.left_s(work)
    return hopeless, -work.deadline_s if hopeless else work.deadline_s


@dataclass(frozen=True, slots=True)
class Alone:
    """One request at a time, its whole prompt."""

    def form(self, head: Job, view: View, order: Order) -> Batch | None:
        parts = [Part(head, head.left_tokens)]
        return Batch(parts) if view.fits(parts) else None


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Chunked prefill: each pass takes `tokens` prompt tokens in the queue's order, the last prompt cut to fit.

    One batch is one pass, and nothing stops it; a cut prompt waits for the next pass with its blocks held. A
    prompt that has not started needs the blocks of its whole length; behind the first one that does not fit
    only those that hold blocks already join. `chunk` bounds what one prompt gets in a pass.

    Raises:
        ValueError: `tokens` or `chunk` below 1.
    """

    tokens: int = 2048
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1 or (self.chunk is not None and self.chunk < 1):
            raise ValueError(f"TokenBudget(tokens={self.tokens}, chunk={self.chunk}): both must be at least 1")

    def form(self, head: Job, view: View, order: Order) -> Batch | None:
        if view.running is not None:
            return view.running
        parts: list[Part] = []
        room = self.tokens
        blocked = False
        for job in view.waiting.by(order):
            part = Part(job, min(job.left_tokens, room, self.chunk or room))
            if not job.done_tokens:
                blocked = blocked or not view.fits([*parts, part])
                if blocked:
                    continue
            parts.append(part)
            room -= part.tokens
            if not room:
                break
        return Batch(parts) if parts else None


@dataclass(frozen=True, slots=True)
class SLOAware:
    """FlowPrefill's batching (arXiv 2602.16603): waiting prompts join the head while its deadline is safe.

    The head runs alone if it has more than `tokens` tokens, or less than `reserve` of its SLO left. Others join
    in the queue's order while the batch has at most `tokens` tokens; the first that would leave the head less
    than `reserve` of its SLO ends the batch. Only the head's deadline counts. `lookahead` bounds how many
    waiting jobs behind the head are looked at (inf: all, to the letter of the reference).

    Raises:
        ValueError: `tokens` below 1, `reserve` outside 0..1, or `lookahead` below 0.
    """

    tokens: int = 2048
    reserve: float = 0.1
    lookahead: float = 64

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 0.0 <= self.reserve <= 1.0 or not self.lookahead >= 0:
            raise ValueError(
                f"SLOAware(tokens={self.tokens}, reserve={self.reserve}, lookahead={self.lookahead}): "
                "tokens must be at least 1, reserve within 0..1, lookahead at least 0 (inf for all)"
            )

    def form(self, head: Job, view: View, order: Order) -> Batch | None:
        parts = [Part(head, head.left_tokens)]
        if not view.fits(parts):
            return None
        total = head.left_tokens
        reserve_s = self.reserve * head.slo_s
        left_s = head.deadline_s - view.now_s
        if view.running is not None or total >= self.tokens or left_s < reserve_s:
            return Batch(parts)
        limit = None if self.lookahead == math.inf else int(self.lookahead) + 1
        for job in islice(view.waiting.by(order), limit):
            if job is head or total + job.left_tokens > self.tokens:
                continue
            joined = [*parts, Part(job, job.left_tokens)]
            if not view.fits(joined):
                continue
            if left_s - view.cost_s(joined) < reserve_s:
                break
            parts = joined
            total += job.left_tokens
        return Batch(parts)


class ComposedPolicy:
    """A policy made of one answer to each question: who first, with whom, where may it stop, when are we asked.

    Args:
        order: a shipped order's name, a function, or the dotted path of one.
        batching: who runs together.
        stops: where a running batch may be stopped; `Stops` or its name.

    Raises:
        ValueError: an unknown name; near names and all choices are given.
    """

    def __init__(self, order: Order | str, batching: Batching, stops: Stops | str) -> None:
        self.order = named(order, ORDERS, "order")
        self.batching = batching
        self.stops = stops if isinstance(stops, Stops) else _stops(stops)

    def select(self, view: View) -> Batch | None:
        held = self._first_held(view)
        head = view.waiting.first(self.order)
        if head is None or (held is not None and self._rank(held, view) <= self._rank(head, view)):
            return held
        return self.batching.form(head, view, self.order) or held

    def _first_held(self, view: View) -> Batch | None:
        """The first of the running and the suspended batches."""
        running, suspended = view.running, view.suspended.first(self.order)
        if running is None or suspended is None:
            return running or suspended
        return min(running, suspended, key=lambda batch: self._rank(batch, view))

    def _rank(self, work: Work, view: View) -> tuple[Any, bool, int]:
        """A total order: ties go to what has started before what waits, then to the lower id."""
        return self.order(work, view), work.is_waiting, work.id

    def __repr__(self) -> str:
        return f"ComposedPolicy({self.order.__name__}, {self.batching}, {self.stops.value})"


ORDERS: dict[str, Order] = {"arrival": arrival, "slack_edf": slack_edf}


def named(given: Callable[..., Any] | str, shipped: dict[str, Any], kind: str) -> Any:
    """A function given as itself, by a shipped name, or by the dotted path ``package.module.function``."""
    if callable(given):
        return given
    if given in shipped:
        return shipped[given]
    module, _, name = str(given).rpartition(".")
    if not module:
        raise ValueError(unknown(kind, given, shipped) + f"; or the dotted path of your own {kind}")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{kind} {given!r} cannot be imported: {error}") from error


def _stops(name: str) -> Stops:
    try:
        return Stops(name)
    except ValueError:
        raise ValueError(unknown("policy.stops", name, [stop.value for stop in Stops])) from None
