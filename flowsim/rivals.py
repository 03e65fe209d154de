"""Orders and batchings to compare with; FlowPrefill's own and its baselines' are in `policy` and `batching`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flowsim.core import Batch, Job, Part
from flowsim.policy import View
from flowsim.queue import Order

__all__ = ["Graceful", "TimeBudget", "least_remaining_slack", "slack_fraction"]

Work = Job | Batch


def least_remaining_slack(work: Work, view: View) -> float:
    """Least slack first, as a share of the request's SLO, and so the most overdue of all first: Medha's rule.

    (deadline - now - predicted seconds left) / (deadline - arrival), ascending, is `_get_remaining_slack_fraction` in
    the scheduler "LRS" of Vajra and of its simulator, the code released with Medha (Agrawal et al., arXiv 2409.17264;
    "input-length aware least remaining slack" in its fourth version). Every key changes all the time, so that a
    decision looks at everything that waits.
    """
    if work.slo_s == math.inf:
        return math.inf
    return (work.deadline_s - view.now_s - view.left_s(work)) / work.slo_s


def slack_fraction(work: Work, view: View) -> tuple[bool, float]:
    """`least_remaining_slack` with what can no longer be on time last, as S-EDF has it, least overdue first.

    A request with 0.1 s to spare of an SLO of 0.25 s and one with 1.6 s of 4 s are equally urgent.
    """
    fraction = least_remaining_slack(work, view)
    return fraction <= 0.0, abs(fraction)


@dataclass(frozen=True)
class Graceful:
    """Slack-aware EDF with ageing: a request that can no longer be on time is not given up, but gets a second
    deadline, `times` its SLO after its arrival, and competes with that.

    Raises:
        ValueError: `times` below 1.
    """

    times: float = 3.0

    def __post_init__(self) -> None:
        if not self.times >= 1.0:
            raise ValueError(f"policy.order.times is {self.times}; it must be at least 1")

    def __call__(self, work: Work, view: View) -> float:
        if view.now_s < self.flips_s(work, view):
            return work.deadline_s
        return work.arrival_s + self.times * work.slo_s

    def flips_s(self, work: Work, view: View) -> float:
        """When it can no longer be on time."""
        return work.deadline_s - view.left_s(work)


@dataclass(frozen=True, slots=True)
class TimeBudget:
    """Chunked prefill with an adaptive chunk: each pass takes as many tokens as are predicted to fit into `busy_s`
    seconds, in the queue's order, so that chunks shrink as attention to earlier tokens grows.

    Otherwise as `flowsim.batching.TokenBudget`. A pass takes at least one token, and at most `tokens`.

    Raises:
        ValueError: `busy_s` not above 0, or `tokens` below 1.
    """

    busy_s: float = 0.1
    tokens: int = 8192

    def __post_init__(self) -> None:
        if not 0.0 < self.busy_s < math.inf or not isinstance(self.tokens, int) or self.tokens < 1:
            raise ValueError(
                f"TimeBudget(busy_s={self.busy_s}, tokens={self.tokens}): busy_s must be above 0, tokens a whole "
                "number of at least 1"
            )

    def form(self, head: Job, view: View, order: Order) -> Batch | None:
        if view.running is not None:
            return view.running
        parts: list[Part] = []
        room = self.tokens
        blocked = False
        for job in view.waiting.by(order):
            whole = Part(job, min(job.left_tokens, room))
            if not job.done_tokens:
                blocked = blocked or not view.fits([*parts, whole])
                if blocked:
                    continue
            tokens = self._tokens(parts, whole, view)
            if tokens:
                parts.append(Part(job, tokens))
                room -= tokens
            if tokens < job.left_tokens or not room:
                break
        return Batch(parts) if parts else None

    def _tokens(self, parts: list[Part], whole: Part, view: View) -> int:
        """The most of a part's tokens that fit into the pass beside the others; at least 1 of the first part."""
        limit_s = self.busy_s + view.request_s
        if view.cost_s([*parts, whole]) <= limit_s:
            return whole.tokens
        low, high = int(not parts), whole.tokens  # low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            fits = view.cost_s([*parts, Part(whole.job, middle)]) <= limit_s
            low, high = (middle, high) if fits else (low, middle)
        return low
