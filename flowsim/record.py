"""The rows of the log: what the executor knows of a batch or a job, in the order of the table's columns."""

from __future__ import annotations

import math
from collections.abc import Iterable

from flowsim.core import Batch, Job, Outcome, Reason
from flowsim.log import Ended, Log
from flowsim.timeline import Stops

__all__ = ["held_by", "log_unfinished", "request_row", "segment_row", "stops_row"]

_OUTCOMES = {outcome: float(place) for place, outcome in enumerate(Outcome)}
_REASONS = {reason: float(place) for place, reason in enumerate(Reason)}
_ENDED = {ended: float(place) for place, ended in enumerate(Ended)}
_STOPS = {stops: float(place) for place, stops in enumerate(Stops)}


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
        job.cached_tokens, job.evictions, job.recomputed_tokens, job.requeued, job.migrations,
    )  # fmt: skip


def stops_row(instance: int, batch: Batch, stops: Stops) -> tuple[float, ...]:
    """Where a batch with stops of its own may be stopped."""
    return batch.number, instance, _STOPS[stops]


def held_by(batch: Batch | None) -> list[Job]:
    """The members of a batch."""
    return [] if batch is None else [*(job for job, _ in batch.parts), *batch.decodes]


def log_unfinished(
    log: Log, instance: int, running: Batch | None, suspended: Iterable[Batch], now_s: float, jobs: Iterable[Job]
) -> None:
    """An instance stops now: its running segment is cut, and `jobs` and the members of suspended batches do not end."""
    if running is not None and running.since_s < now_s:
        end_s = min(now_s, running.since_s + running.timeline.total_s - running.done_s)
        log.segments.add(segment_row(instance, running, end_s, running.operators, Ended.CUT))
    left = {job.id: job for job in jobs}
    for batch in suspended:
        for job in held_by(batch):
            job.suspended_s += now_s - batch.suspended_at_s
            left[job.id] = job
    for job in left.values():
        log.requests.add(request_row(instance, job, math.nan, Outcome.UNFINISHED, None))
