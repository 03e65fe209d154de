"""Who runs together: the shipped batchings, each an answer to `form(head, view, order)`.

A batching sees what a policy sees and changes nothing. While a batch runs its answer only says whether that one
should stop, and for whom: it is asked again at the stop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

from flowsim.core import Batch, Job, Part
from flowsim.policy import View
from flowsim.queue import Order

__all__ = ["Alone", "Everyone", "SLOAware", "TokenBudget"]


@dataclass(frozen=True, slots=True)
class Alone:
    """One request at a time, its whole prompt."""

    def form(self, head: Job, view: View, order: Order) -> Batch | None:
        parts = [Part(head, head.left_tokens)]
        return Batch(parts) if view.fits(parts) else None


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Chunked prefill: each pass takes `tokens` tokens, one for every decode and then prompts in the queue's order, the
    last one cut to fit.

    One batch is one pass, and nothing stops it; a cut prompt waits for the next pass with its blocks held. A
    prompt that has not started needs the blocks of its whole length; behind the first one that does not fit
    only those that hold blocks already join, and none starts while a sequence has just lost its blocks to the growth
    of others. `chunk` bounds what one prompt gets in a pass. Jobs that come with their KV join the decodes likewise.
    A run of decodes alone ends early for those that can join it.

    Raises:
        ValueError: `tokens` or `chunk` below 1.
    """

    tokens: int = 2048
    chunk: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int) or self.tokens < 1 or (self.chunk is not None and self.chunk < 1):
            raise ValueError(f"TokenBudget(tokens={self.tokens}, chunk={self.chunk}): both must be at least 1")

    def form(self, head: Job, view: View, order: Order) -> Batch | None:
        if view.running is not None and view.running.parts:
            return view.running
        decodes = view.decoding
        parts, joining = filled(view, order, self.tokens - len(decodes), self.chunk)
        if view.running is not None and not parts and not joining:
            return view.running
        return Batch(parts, [*decodes, *joining]) if parts or joining or decodes else None


def filled(view: View, order: Order, room: int, chunk: int | None = None) -> tuple[list[Part], list[Job]]:
    """What shares `room` tokens of a pass, in an order: prompts, the last one cut to fit, and the jobs that join the
    decodes, a token each. See `TokenBudget`."""
    parts: list[Part] = []
    joining: list[Job] = []
    blocked = view.evicted
    for job in view.waiting.by(order):
        if room <= 0:
            break
        part = Part(job, min(view.left_tokens(job), room, chunk or room))
        if not part.tokens:
            if view.fits(parts, [*joining, job]):
                joining.append(job)
                room -= 1
            continue
        if not job.done_tokens:
            blocked = blocked or not view.fits([*parts, part], joining)
            if blocked:
                continue
        parts.append(part)
        room -= part.tokens
    return parts, joining


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
        if (
            not isinstance(self.tokens, int)
            or self.tokens < 1
            or not 0.0 <= self.reserve <= 1.0
            or not self.lookahead >= 0
        ):
            raise ValueError(
                f"SLOAware(tokens={self.tokens}, reserve={self.reserve}, lookahead={self.lookahead}): "
                "tokens must be a whole number of at least 1, reserve within 0..1, lookahead at least 0 (inf for all)"
            )

    def form(self, head: Job, view: View, order: Order) -> Batch | None:
        tokens = head.prompt_tokens - head.done_tokens
        parts = [Part(head, tokens)]
        if not view.fits(parts):
            return None
        if view.running is None and tokens < self.tokens and len(view.waiting) > 1:
            left_s = head.deadline_s - view.now_s
            if left_s >= self.reserve * head.slo_s:
                parts = self._filled(parts, left_s, view, order)
        return Batch(parts)

    def _filled(self, parts: list[Part], left_s: float, view: View, order: Order) -> list[Part]:
        """The head, whose deadline is `left_s` seconds away, with those who join it."""
        head, tokens = parts[0]
        room = self.tokens - tokens
        reserve_s = self.reserve * head.slo_s
        limit = None if self.lookahead == math.inf else int(self.lookahead) + 1
        for job in islice(view.waiting.by(order), limit):
            if job.prompt_tokens - job.done_tokens > room or job is head:
                continue
            tokens = job.prompt_tokens - job.done_tokens
            joined = [*parts, Part(job, tokens)]
            if not view.fits(joined):
                continue
            if left_s - view.cost_s(joined) < reserve_s:
                break
            parts = joined
            room -= tokens
        return parts


@dataclass(frozen=True, slots=True)
class Everyone:
    """Static batching: whole prompts in the queue's order, up to `max_jobs` of them, as long as their blocks fit.

    Raises:
        ValueError: `max_jobs` below 1.
    """

    max_jobs: int = 8

    def __post_init__(self) -> None:
        if self.max_jobs < 1:
            raise ValueError(f"Everyone(max_jobs={self.max_jobs}): must be at least 1")

    def form(self, head: Job, view: View, order: Order) -> Batch | None:
        parts = [Part(head, head.left_tokens)]
        if not view.fits(parts):
            return None
        if view.running is None:
            for job in islice(view.waiting.by(order), 1, self.max_jobs):
                if not view.fits([*parts, Part(job, job.left_tokens)]):
                    break
                parts.append(Part(job, job.left_tokens))
        return Batch(parts)
