"""Chunked prefill beside decodes in one engine: `policy=hybrid_chunked`, and what decode pools run.

The rules are those of a production write-up (docs/policies.md). This module knows no simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from flowsim.core import Batch, Job, Part
from flowsim.policy import InteractiveFirst, View, arrival, named
from flowsim.queue import Order
from flowsim.timeline import Stops

__all__ = ["HYBRID_ORDERS", "HybridChunked", "InteractiveLIFO"]

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
        age_s: of the prompts that arrived so long ago the oldest comes first in each step, with `aged_share` of what
            the decodes leave of it, so that a stream of interactive ones cannot starve it. inf: never.
        aged_share: above 0, at most 1.

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
        aged_share: float = 0.25,
    ) -> None:
        for name, value in (("tokens", tokens), ("chunk", chunk)):
            if (value is not None or name != "chunk") and not (isinstance(value, int) and value >= 1):
                raise ValueError(f"policy.{name} is {value!r}; it must be a whole number, at least 1")
        if not interactive_s >= 0.0:
            raise ValueError(f"policy.interactive_s is {interactive_s}; it must be at least 0")
        if not age_s > 0.0:
            raise ValueError(f"policy.age_s is {age_s}; it must be above 0 (inf for no ageing)")
        if not 0.0 < aged_share <= 1.0:
            raise ValueError(f"policy.aged_share is {aged_share}; it must be above 0 and at most 1")
        self.tokens = tokens
        self.chunk = chunk
        shipped = {name: make(interactive_s) for name, make in HYBRID_ORDERS.items()}
        self.order: Order = named(order, shipped, "policy.order")
        self.interactive_s = interactive_s
        self.age_s = age_s
        self.aged_share = aged_share

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
        room = self.tokens - len(view.decoding)
        parts = self._aged(view, room)
        room -= sum(part.tokens for part in parts)
        first = parts[0].job if parts else None
        joining: list[Job] = []  # those that decode already take nothing that they have not
        blocked = False
        for job in view.waiting.by(self.order) if room > 0 else ():
            if job is first:
                continue
            if not job.left_tokens:
                if view.fits(parts, [*joining, job]):
                    joining.append(job)
                    room -= 1
            else:
                part = Part(job, min(view.left_tokens(job), room, self.chunk or room))
                blocked = blocked or not (job.done_tokens or view.fits([*parts, part], joining))
                if job.done_tokens or not blocked:
                    parts.append(part)
                    room -= part.tokens
            if room < 1:
                break
        return [*view.decoding, *joining], parts

    def _aged(self, view: View, room: int) -> list[Part]:
        """The oldest prompt's share of a step, once it is old enough."""
        if self.age_s == math.inf or room < 1:
            return []
        oldest = view.waiting.first(arrival)
        if oldest is None or not oldest.left_tokens or view.now_s < oldest.arrival_s + self.age_s:
            return []
        share = max(1, int(self.aged_share * room))
        part = Part(oldest, min(view.left_tokens(oldest), share, self.chunk or share))
        return [part] if oldest.done_tokens or view.fits([part]) else []

    def __repr__(self) -> str:
        order = getattr(self.order, "__name__", self.order)
        return f"HybridChunked(tokens={self.tokens}, chunk={self.chunk}, order={order}, age_s={self.age_s})"


HYBRID_ORDERS: dict[str, Callable[[float], Order]] = {
    "interactive_first": InteractiveFirst,
    "interactive_lifo": InteractiveLIFO,
    "arrival": lambda _: arrival,
}
