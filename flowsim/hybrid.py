"""Chunked prefill beside decodes in one engine: `policy=hybrid_chunked`, and what decode pools run.

The rules are those of a production write-up (docs/policies.md). This module knows no simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from flowsim.core import Batch, Job, Part
from flowsim.policy import InteractiveFirst, View, arrival, named
from flowsim.queue import Order, indexed
from flowsim.timeline import Stops

__all__ = ["HYBRID_ORDERS", "HybridChunked", "InteractiveLIFO", "aged"]

Work = Job | Batch


@dataclass(frozen=True)
class InteractiveLIFO:
    """Requests with a TTFT SLO of at most `within_s` seconds before all others, the latest of them first, as the
    write-up inserts them: under load the oldest starves."""

    within_s: float = 1.0

    def __call__(self, work: Work, _view: View) -> tuple[bool, float]:
        late = work.slo_s > self.within_s
        return late, work.arrival_s if late else -work.arrival_s

    def flips_s(self, _work: Work, _view: View) -> float:
        """Never: keys stand still."""
        return math.inf


def aged(limit_s: float, order: Order) -> Order:
    """An order in which what arrived `limit_s` ago or earlier precedes everything else, the oldest first; before that
    it is `order`."""

    def ageing(work: Work, view: View) -> tuple[bool, object]:
        return (False, work.arrival_s) if view.now_s >= work.arrival_s + limit_s else (True, order(work, view))

    def flips_s(work: Work, view: View) -> float:
        old_s = work.arrival_s + limit_s
        return min((at_s for at_s in (old_s, order.flips_s(work, view)) if at_s > view.now_s), default=math.inf)  # type: ignore[attr-defined]

    return indexed(flips_s)(ageing) if hasattr(order, "flips_s") else ageing


class HybridChunked:
    """Each step every sequence that decodes gets a token, and what is left of the budget goes to waiting prompts.

    A step has `tokens` tokens: one for each decode, first; then waiting prompts in their order, each the least of what
    it has left, `chunk`, and what the budget has left. A prompt takes the blocks of its whole length when it starts;
    behind the first that does not fit, only those that hold blocks already go on. Where prompts are prefilled
    elsewhere, what has come with its KV joins the decodes. An arrival that could join ends a run of
    steps of decodes alone.

    Args:
        tokens: of a step.
        chunk: of one prompt in a step, at most; None: the budget.
        order: who is first: `interactive_first`, `interactive_lifo`, `arrival`, or a function or its dotted path.
        interactive_s: requests with a TTFT SLO of at most so many seconds are interactive.
        age_s: a prompt that arrived so long ago precedes all others, so that a stream of interactive ones cannot starve
            it. inf: never.

    Raises:
        ValueError: a value out of its range, an unknown order.
    """

    stops = Stops.PASS

    def __init__(
        self,
        *,
        tokens: int = 2048,
        chunk: int | None = 512,
        order: Order | str = "interactive_first",
        interactive_s: float = 1.0,
        age_s: float = math.inf,
    ) -> None:
        for name, value in (("tokens", tokens), ("chunk", chunk)):
            if (value is not None or name != "chunk") and not (isinstance(value, int) and value >= 1):
                raise ValueError(f"policy.{name} is {value!r}; it must be a whole number, at least 1")
        if not interactive_s >= 0.0:
            raise ValueError(f"policy.interactive_s is {interactive_s}; it must be at least 0")
        if not age_s > 0.0:
            raise ValueError(f"policy.age_s is {age_s}; it must be above 0 (inf for no ageing)")
        self.tokens = tokens
        self.chunk = chunk
        shipped = {name: make(interactive_s) for name, make in HYBRID_ORDERS.items()}
        self.order: Order = named(order, shipped, "policy.order")
        self.interactive_s = interactive_s
        self.age_s = age_s
        self._order = aged(age_s, self.order) if age_s < math.inf else self.order

    def select(self, view: View) -> Batch | None:
        running = view.running
        if running is None and view.suspended:
            return next(iter(view.suspended))  # no batch of this policy is ever paused
        if running is not None and (running.parts or not view.waiting):
            return running  # a step of both goes to its end
        decodes, parts = self._step(view)
        if running is not None and not parts and len(decodes) == len(view.decoding):
            return running
        return Batch(parts, decodes) if parts or decodes else None

    def _step(self, view: View) -> tuple[list[Job], list[Part]]:
        """Who decodes in the next step, and which chunks are prefilled beside them."""
        decodes: list[Job] = list(view.decoding)
        parts: list[Part] = []
        room = self.tokens - len(decodes)
        blocked = False
        for job in view.waiting.by(self._order):
            if room < 1:
                break
            if not job.left_tokens:
                if view.fits(parts, [*decodes, job]):
                    decodes.append(job)
                    room -= 1
                continue
            part = Part(job, min(view.left_tokens(job), room, self.chunk or room))
            if not job.done_tokens:
                blocked = blocked or not view.fits([*parts, part], decodes)
                if blocked:
                    continue
            parts.append(part)
            room -= part.tokens
        return decodes, parts

    def __repr__(self) -> str:
        order = getattr(self.order, "__name__", self.order)
        return f"HybridChunked(tokens={self.tokens}, chunk={self.chunk}, order={order}, age_s={self.age_s})"


HYBRID_ORDERS: dict[str, Callable[[float], Order]] = {
    "interactive_first": InteractiveFirst,
    "interactive_lifo": InteractiveLIFO,
    "arrival": lambda _: arrival,
}
