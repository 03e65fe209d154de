"""The data that everything else passes around: what was asked, how far it is, what runs together.

Data only. This module must not know scheduling, latencies, the simulator's clock or any file format.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flowsim.timeline import Timeline

__all__ = ["Batch", "FailedRunsError", "Job", "Outcome", "Part", "PolicyError", "Reason", "Request"]


class PolicyError(RuntimeError):
    """A policy gave an answer that the contract of `select` forbids."""


class FailedRunsError(RuntimeError):
    """Some runs of a study failed, and are listed; the others are in its results."""


class Outcome(enum.Enum):
    """How a request ended; every request of a run has exactly one."""

    FINISHED = "finished"
    REJECTED = "rejected"
    UNFINISHED = "unfinished"


class Reason(enum.Enum):
    """Why a request was rejected."""

    TOO_LARGE = "too_large"
    ADMISSION = "admission"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of a workload; frozen, so that one list serves every policy compared on it.

    `id` is the request's row after the stable sort by arrival. Times are seconds, `arrival_s` from the
    start of the workload. An SLO of `inf` means that the request has none. A client gives up `abandon_s` after
    arrival if the prefill has not started by then.

    Raises:
        ValueError: a negative or non-finite arrival, fewer than one prompt or output token, or an SLO that
            is not positive.
    """

    id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int = 1
    ttft_slo_s: float = math.inf
    tbt_slo_s: float = math.inf
    slo_class: str = "default"
    prefix_hashes: tuple[int, ...] = ()
    abandon_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0.0 <= self.arrival_s < math.inf:
            raise ValueError(f"request {self.id}: arrival_s is {self.arrival_s}; it must be finite and >= 0")
        if not (_is_count(self.prompt_tokens) and _is_count(self.output_tokens)):
            raise ValueError(
                f"request {self.id}: prompt_tokens is {self.prompt_tokens} and output_tokens "
                f"{self.output_tokens}; both must be whole numbers of at least 1"
            )
        if not (self.ttft_slo_s > 0.0 and self.tbt_slo_s > 0.0 and self.abandon_s > 0.0):
            raise ValueError(
                f"request {self.id}: ttft_slo_s is {self.ttft_slo_s}, tbt_slo_s {self.tbt_slo_s} and abandon_s "
                f"{self.abandon_s}; all must be > 0 (inf for none)"
            )


def _is_count(number: object) -> bool:
    """Whether something is a whole number of at least 1; numpy's will do."""
    try:
        return operator.index(number) >= 1  # type: ignore[arg-type]
    except TypeError:
        return False


class Job:
    """One request's progress in one run; only its Instance writes to it.

    `done_tokens` are prompt tokens computed so far. A job that waits with `done_tokens > 0` is a chunked
    prefill between its chunks and keeps its KV blocks.
    """

    __slots__ = (
        "arrival_s",
        "blocked_s",
        "deadline_s",
        "done_tokens",
        "id",
        "preemptions",
        "prompt_tokens",
        "request",
        "slo_s",
        "start_s",
        "suspended_s",
    )
    is_waiting = True

    def __init__(self, request: Request) -> None:
        self.request = request
        self.id = request.id
        self.arrival_s = request.arrival_s
        self.slo_s = request.ttft_slo_s
        self.deadline_s = request.arrival_s + request.ttft_slo_s
        self.prompt_tokens = request.prompt_tokens
        self.done_tokens = 0
        self.start_s = math.nan
        self.blocked_s = 0.0
        self.suspended_s = 0.0
        self.preemptions = 0

    @property
    def left_tokens(self) -> int:
        """Prompt tokens still to compute."""
        return self.prompt_tokens - self.done_tokens

    def __repr__(self) -> str:
        return f"Job({self.id}, {self.done_tokens}/{self.prompt_tokens} tokens, due {self.deadline_s:.3f} s)"


class Part(NamedTuple):
    """Prefill the next `tokens` prompt tokens of `job`."""

    job: Job
    tokens: int


@dataclass(slots=True, eq=False)
class Batch:
    """What runs together, as one unit and at the priority of its first part; members never change once started.

    To an order a batch looks like its head: `id`, `arrival_s`, `slo_s`, `deadline_s`; `is_waiting` is False. The fields
    after `parts` are the Instance's: `done_s` seconds of `timeline` have run by the last stop, `operators` of
    them ended, `since_s` is when the segment now running began, after the `switch_s` that taking over cost,
    `suspended_at_s` when the batch was paused (NaN unless it is suspended) and `suspended_s` for how long it was
    before, `predicted_s` what the predictor gave for the whole batch when it started.
    """

    parts: Sequence[Part]
    number: int = -1
    timeline: Timeline = field(default=Timeline(()), repr=False)
    predicted_s: float = math.nan
    done_s: float = 0.0
    operators: int = 0
    since_s: float = math.nan
    switch_s: float = 0.0
    suspended_at_s: float = math.nan
    suspended_s: float = 0.0
    resumes: int = 0
    blocks: int = 0
    id: int = field(init=False)
    slo_s: float = field(init=False)
    arrival_s: float = field(init=False)
    deadline_s: float = field(init=False)
    tokens: int = field(init=False)

    @property
    def is_waiting(self) -> bool:
        return False

    @property
    def head(self) -> Job:
        """The job whose deadline the batch carries."""
        return self.parts[0].job

    def __post_init__(self) -> None:
        self.parts = tuple(self.parts)
        if not self.parts:
            raise PolicyError("a batch needs at least one part; answer None to run nothing")
        self.tokens = 0
        for part in self.parts:
            if not (isinstance(part, Part) and isinstance(part.tokens, int)):
                raise PolicyError(f"a batch is made of Part(job, tokens) with whole tokens; got {self.parts!r:.80}")
            self.tokens += part.tokens
        head = self.head
        self.id, self.arrival_s, self.slo_s, self.deadline_s = head.id, head.arrival_s, head.slo_s, head.deadline_s
