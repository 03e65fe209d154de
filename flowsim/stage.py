"""What a batch does to its jobs and to KV memory: taken at its start, credited at its end.

The executor knows a Stage by these few calls. `PrefillStage` is that of instances whose requests end, or move on, with
their first token; `flowsim.decoding` has the one that goes on to the last. This module knows no policy and no events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from flowsim.core import Batch, Job, Outcome, Part, Request
from flowsim.kv import Blocks
from flowsim.latency import NO_DECODES, Decodes, LatencyModel, Predictor, Tokens
from flowsim.log import Log
from flowsim.record import stops_row
from flowsim.timeline import Stops
from flowsim.view import InstanceView, cached_tokens

__all__ = [
    "Host", "PrefillStage", "Stage",
    "computed", "has_started", "lay_out", "lay_out_stops", "take_parts", "taken_up", "under_way",
]  # fmt: skip


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

    def end(self, batch: Batch, operators: int) -> bool:
        """A batch ended now, after that many of its operators: its tokens are out. Answers whether all of its prompts
        are complete."""
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
        if batch.layers is not None:
            lay_out(own, batch, batch.layers, tokens, NO_DECODES)
        elif batch.stops is not None:
            lay_out_stops(own, batch, batch.stops, tokens)
        else:
            batch.timeline = own.latency.timeline(tokens, batch.slowest)
            batch.predicted_s = own.predictor.batch_s(tokens)

    def advance(self, batch: Batch) -> None:
        raise AssertionError("an instance that only prefills plans no batch ahead")

    def end(self, batch: Batch, operators: int) -> bool:
        """Credits the batch's tokens: a prompt that is complete emits its first token, a cut one waits again."""
        own = self._instance
        token_s = own.view.now_s + own.view.request_s
        cut = False
        again: list[Job] = []
        for job, new in computed(own, batch):
            job.done_tokens = done_tokens = job.done_tokens + new
            if done_tokens < job.prompt_tokens:
                own.view.waiting.add(job)
                cut = True
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
        return not cut and own.view.completes(batch)

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
        under_way(self._instance, batch)

    def leave(self, job: Job) -> None:
        """Nobody counts its steps."""


def take_parts(own: Host, batch: Batch, admitted: Callable[[Job], None]) -> list[tuple[int, int]]:
    """The prefills of a batch leave the queue, those that start with the KV blocks of their whole prompts.

    What the prefix cache holds of a prompt is done already: a part has at most what is left. `admitted` is called with
    each job that starts. Returns (new, cached) tokens of each part.
    """
    waiting, kv, add = own.view.waiting, own.kv, own.log.batches.add
    remembers, number, index = kv.remembers, batch.number, own.index
    fills = remembers and own.view.completes(batch)
    batch.slowest = slowest = own.slowest()
    tokens: list[tuple[int, int]] = []
    for job, new in batch.parts:
        waiting.remove(job)
        done_tokens = job.done_tokens
        if not (done_tokens or job.done_layers):
            if remembers:
                job.done_tokens = done_tokens = cached_tokens(kv, job)
                new = min(new, job.prompt_tokens - done_tokens)
            kv.take(job.id, kv.blocks(job.prompt_tokens), job.block_name)
            if job.start_s != job.start_s:
                job.start_s = batch.since_s
                job.cached_tokens = done_tokens
            else:
                job.recomputed_tokens -= done_tokens
            admitted(job)
        if fills:
            kv.fill(job.id, (done_tokens + new) // kv.block_tokens, job.block_name)
        add((number, index, job.id, len(tokens), new, done_tokens, slowest))
        tokens.append((new, done_tokens))
    if remembers:
        batch.parts = tuple([Part(job, new) for (job, _), (new, _) in zip(batch.parts, tokens, strict=True)])
        batch.tokens = len(batch.decodes) + sum([new for new, _ in tokens])
    return tokens


def lay_out(own: Host, batch: Batch, layers: range, tokens: Tokens, decodes: Decodes) -> None:
    """Gives a batch whose prompts go through some layers its timeline, and what is predicted for it."""
    own.log.layers.add((batch.number, own.index, layers.start, layers.stop, own.view.layers))
    batch.timeline = own.latency.layered(tokens, layers, batch.slowest, decodes)
    batch.predicted_s = own.view.cost_s(batch.parts, batch.decodes, layers)


def lay_out_stops(own: Host, batch: Batch, stops: Stops, tokens: Tokens) -> None:
    """Gives a batch with stops of its own its timeline, and what is predicted for it. The predictor answers for its
    policy's stops; a scheduler knows how many checks it adds or leaves out, and what one costs."""
    own.log.stops.add(stops_row(own.index, batch, stops))
    latency = own.latency.stopping(stops)
    batch.timeline = timeline = latency.timeline(tokens, batch.slowest)
    passes = len(timeline.passes)
    batch.predicted_s = own.predictor.batch_s(tokens) + latency.checks_s(passes) - own.latency.checks_s(passes)


def computed(own: Host, batch: Batch) -> Sequence[Part]:
    """The parts whose tokens a batch that ends has computed. What it has not taken through the last layer waits, so
    many layers further."""
    layers = batch.layers
    if layers is None:
        return batch.parts
    completes = own.view.completes(batch)
    for job, new in batch.parts:
        job.done_layers, job.layered_tokens = (0, 0) if completes else (layers.stop, new)
        if not completes:
            own.view.waiting.add(job)
    return batch.parts if completes else ()


def _admitted(_job: Job) -> None:
    """Nobody counts the sequences of an instance that only prefills."""


def under_way(own: Host, batch: Batch) -> None:
    """What a batch was to compute of its prompts counts as done, and so as lost, when it is lost with them."""
    for job, new in batch.parts if own.view.completes(batch) else ():
        job.done_tokens += new


def taken_up(batch: Batch, now_s: float) -> None:
    """A suspended batch goes on: notes for how long it and its jobs were suspended."""
    waited_s = now_s - batch.suspended_at_s
    batch.since_s = now_s
    batch.switch_s = 0.0
    batch.suspended_s += waited_s
    batch.suspended_at_s = math.nan
    for job, _ in batch.parts:
        job.suspended_s += waited_s


def has_started(job: Job) -> bool:
    """Whether some batch, here or elsewhere, has had the job."""
    return not math.isnan(job.start_s)
