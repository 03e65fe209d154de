"""What a batch does to its jobs and to KV memory: taken at its start, credited at its end.

The executor knows a Stage by these few calls. `PrefillStage` is that of instances whose requests end, or move on, with
their first token; `flowsim.decoding` has the one that goes on to the last. This module knows no policy and no events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol

from flowsim.core import Batch, Job, Outcome, Part, Request
from flowsim.kv import Blocks
from flowsim.latency import LatencyModel, Predictor
from flowsim.log import Log
from flowsim.timeline import Stops, Timeline
from flowsim.view import InstanceView, cached_tokens

__all__ = [
    "Host", "PrefillStage", "Stage",
    "checks_beyond_s", "hardware_of", "has_started", "take_parts", "taken_up", "under_way",
]  # fmt: skip

_STOPS: dict[Stops | None, float] = {None: math.nan, **{stops: float(place) for place, stops in enumerate(Stops)}}


class Host(Protocol):
    """What a stage needs of its instance."""

    @property
    def index(self) -> int: ...
    @property
    def view(self) -> InstanceView: ...
    @property
    def kv(self) -> Blocks: ...
    @property
    def latency(self) -> LatencyModel: ...
    @property
    def predictor(self) -> Predictor: ...
    @property
    def log(self) -> Log: ...
    @property
    def slowest(self) -> Callable[[], float]: ...
    @property
    def prefilled(self) -> Callable[[Request], None]: ...
    @property
    def ended(self) -> Callable[[Request, float], None]: ...
    def log_kv(self) -> None: ...
    def log_request(self, job: Job, finish_s: float, outcome: Outcome) -> None: ...


class Stage(Protocol):
    """What batches of one instance do to jobs. The executor calls `take` once and `end` once for each batch, in this
    order, with `advance` between them where it plans the following batch before this one has ended."""

    def most_tokens(self, request: Request) -> int:
        """Tokens of context whose KV the request will hold at once, at most."""
        ...

    def make_room(self) -> None:
        """Called before the policy is asked what a free GPU runs next."""
        ...

    def take(self, batch: Batch) -> None:
        """A batch begins at its `since_s`: takes its jobs and KV blocks, and lays out its timeline."""
        ...

    def advance(self, batch: Batch) -> None:
        """Moves the jobs of a batch that will run to its end to where they will be then."""
        ...

    def end(self, batch: Batch, operators: int) -> None:
        """A batch ended now, after that many of its operators: its tokens are out."""
        ...

    def reserved_blocks(self) -> int:
        """Free blocks that what runs will take before its end."""
        ...

    def under_way(self) -> Iterable[Job]:
        """Jobs that hold KV here and are in neither a queue nor a batch."""
        ...

    def lose(self, batch: Batch) -> None:
        """A batch will not end, as its instance has failed: nothing comes out of it."""
        ...

    def leave(self, job: Job) -> None:
        """A job goes on elsewhere."""
        ...


class PrefillStage:
    """Batches compute prompts, and a request is done here with its first token.

    Args:
        instance: whose jobs these are.
        handed: takes a job whose prefill has ended and which has tokens left to generate; its blocks stay held until
            `Instance.release`. None: the request ends there, and its output tokens are ignored.
    """

    def __init__(self, instance: Host, handed: Callable[[Job], None] | None = None) -> None:
        self._instance = instance
        self._handed = handed

    def most_tokens(self, request: Request) -> int:
        return request.prompt_tokens

    def make_room(self) -> None:
        """What waits takes only what is free."""

    def take(self, batch: Batch) -> None:
        own = self._instance
        tokens = take_parts(own, batch, _admitted)
        batch.timeline = hardware_of(own, batch).timeline(tokens, batch.slowest)
        batch.predicted_s = own.predictor.batch_s(tokens) + checks_beyond_s(own, batch)

    def advance(self, batch: Batch) -> None:
        raise AssertionError("an instance that only prefills plans no batch ahead")

    def end(self, batch: Batch, operators: int) -> None:
        """Credits the batch's tokens: a prompt that is complete emits its first token, a cut one waits again."""
        own = self._instance
        token_s = own.view.now_s + own.latency.profile.request_s
        again: list[Job] = []
        for job, new in batch.parts:
            job.done_tokens += new
            if job.done_tokens < job.prompt_tokens:
                own.view.waiting.add(job)
                continue
            job.generated_tokens += 1
            if job.prefill_instance < 0:
                job.first_token_s = token_s
                job.prefill_instance = own.index
            else:
                again.append(job)
            if self._handed is not None and job.generated_tokens < job.request.output_tokens:
                self._handed(job)
            else:
                own.kv.give(job.id)
                own.log_request(job, token_s, Outcome.FINISHED)
                own.ended(job.request, token_s)
        if again:
            self._count_tokens(batch, again, token_s)

    def _count_tokens(self, batch: Batch, again: list[Job], token_s: float) -> None:
        """What is prefilled anew gets a token that is not its first: of a step, as where it is decoded."""
        own = self._instance
        step = own.log.steps_of(own.index, 1)
        own.log.steps.add(
            (batch.number, own.index, step, 1, token_s, batch.timeline.total_s, 0.0, *batch.context, batch.slowest)
        )
        for job in again:
            own.log.tokens.add((job.id, own.index, step, step + 1))

    def reserved_blocks(self) -> int:
        return 0

    def under_way(self) -> Iterable[Job]:
        return ()

    def lose(self, batch: Batch) -> None:
        under_way(batch)

    def leave(self, job: Job) -> None:
        """Nobody counts its steps."""


def take_parts(own: Host, batch: Batch, admitted: Callable[[Job], None]) -> list[tuple[int, int]]:
    """The prefills of a batch leave the queue, those that start with the KV blocks of their whole prompts.

    What the prefix cache holds of a prompt is done already: a part has at most what is left. `admitted` is called with
    each job that starts. Returns (new, cached) tokens of each part.
    """
    waiting, kv, rows = own.view.waiting, own.kv, own.log.batches
    batch.slowest = slowest = own.slowest()
    stops = _STOPS[batch.stops]
    tokens: list[tuple[int, int]] = []
    for position, (job, new) in enumerate(batch.parts):
        waiting.remove(job)
        if not job.done_tokens:
            job.done_tokens = found = cached_tokens(kv, job) if kv.remembers else 0
            kv.take(job.id, kv.blocks(job.prompt_tokens), job.block_name)
            if job.start_s != job.start_s:
                job.start_s = batch.since_s
                job.cached_tokens = found
            else:
                job.recomputed_tokens -= found
            admitted(job)
            new = min(new, job.prompt_tokens - found)
        if kv.remembers:
            kv.fill(job.id, (job.done_tokens + new) // kv.block_tokens, job.block_name)
        batch.blocks += kv.held(job.id)
        tokens.append((new, job.done_tokens))
        rows.add((batch.number, own.index, job.id, position, new, job.done_tokens, slowest, stops))
    if kv.remembers and any(part.tokens != new for part, (new, _) in zip(batch.parts, tokens, strict=True)):
        batch.parts = tuple(Part(part.job, new) for part, (new, _) in zip(batch.parts, tokens, strict=True))
        batch.tokens = len(batch.decodes) + sum(new for new, _ in tokens)
    return tokens


def hardware_of(own: Host, batch: Batch) -> LatencyModel:
    """The instance's hardware with the checks of the batch's own stops, if it has some."""
    return own.latency if batch.stops is None else own.latency.stopping(batch.stops)


def checks_beyond_s(own: Host, batch: Batch) -> float:
    """Seconds of checks that a batch has beyond those of its policy's stops, for which the predictor answers: a
    scheduler knows how many it adds or leaves out, and what one costs."""
    if batch.stops is None:
        return 0.0
    assert isinstance(batch.timeline, Timeline)
    passes = len(batch.timeline.passes)
    return hardware_of(own, batch).checks_s(passes) - own.latency.checks_s(passes)


def _admitted(_job: Job) -> None:
    """Nobody counts the sequences of an instance that only prefills."""


def under_way(batch: Batch) -> None:
    """What a batch was to compute of its prompts counts as done, and so as lost, when it is lost with them."""
    for job, new in batch.parts:
        job.done_tokens += new


def taken_up(batch: Batch, now_s: float) -> None:
    """A suspended batch goes on: notes for how long it and its jobs were suspended."""
    waited_s = now_s - batch.suspended_at_s
    batch.resumes += 1
    batch.since_s = now_s
    batch.switch_s = 0.0
    batch.suspended_s += waited_s
    batch.suspended_at_s = math.nan
    for job, _ in batch.parts:
        job.suspended_s += waited_s


def has_started(job: Job) -> bool:
    """Whether some batch, here or elsewhere, has had the job."""
    return not math.isnan(job.start_s)
