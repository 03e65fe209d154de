"""The rows of the log: what the executor knows of a batch or a job, in the order of the table's columns."""

from __future__ import annotations

import math

from flowsim.core import Batch, Job, Outcome, Reason
from flowsim.log import Ended

__all__ = ["request_row", "segment_row"]

_OUTCOMES = {outcome: float(place) for place, outcome in enumerate(Outcome)}
_REASONS = {reason: float(place) for place, reason in enumerate(Reason)}
_ENDED = {ended: float(place) for place, ended in enumerate(Ended)}


def segment_row(
    instance: int, batch: Batch, end_s: float, last_op: int, ended: Ended, barrier_s: float = 0.0
) -> tuple[float, ...]:
    """A stretch of a batch on an instance, from where it stopped last to `last_op`."""
    return (
        instance, batch.number, batch.since_s, end_s, batch.operators, last_op, batch.tokens, _ENDED[ended],
        batch.switch_s, barrier_s,
    )  # fmt: skip


def request_row(instance: int, job: Job, finish_s: float, outcome: Outcome, reason: Reason | None) -> tuple[float, ...]:
    """What became of a request that ended on an instance."""
    return (
        job.id, job.start_s, job.first_token_s, finish_s, job.blocked_s, job.preemptions, job.suspended_s,
        instance if job.prefill_instance < 0 else job.prefill_instance, _OUTCOMES[outcome],
        math.nan if reason is None else _REASONS[reason], instance if job.run_step >= 0 else math.nan,
        job.cached_tokens, job.evictions, job.recomputed_tokens,
    )  # fmt: skip
