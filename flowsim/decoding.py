"""The stage of an instance that goes on to the last token: continuous batching over growing KV.

Colocated engines, and the decode instances of a disaggregated cluster, whose jobs come with their KV. This module
knows no policy and no events.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from flowsim.core import Batch, Job, Outcome, Request
from flowsim.latency import NO_DECODES
from flowsim.stage import Host, computed, lay_out, lay_out_stops, take_parts, under_way
from flowsim.timeline import Iterations
from flowsim.view import context_of

__all__ = ["DecodingStage"]


class DecodingStage:
    """Batches compute prompts and decode; a request is done with its last token.

    A job takes the blocks of its prompt when its prefill starts, and one more whenever its context outgrows them. Where
    none is free the sequence admitted last loses all of its blocks and waits to compute its prompt and the tokens
    generated so far anew (recompute), until the growth of all others fits.

    Args:
        instance: whose jobs these are.
        most_steps: iterations that a batch of decodes alone runs at most before its policy is asked again; None: up
            to the first member's last token, or as many as free blocks allow. The policy is asked on arrivals all the
            same.
    """

    def __init__(self, instance: Host, most_steps: int | None = None) -> None:
        self._instance = instance
        self._most_steps = most_steps
        self._admitted: dict[int, Job] = {}  # in this order; those whose last token is not yet decided
        self._ending: dict[int, list[Job]] = {}  # by batch number: those that end with it
        self._emitting: dict[int, list[Job]] = {}  # likewise: prompts that are complete with it
        self._reserved_blocks = 0

    def most_tokens(self, request: Request) -> int:
        return request.prompt_tokens + request.output_tokens - 1

    def reserved_blocks(self) -> int:
        """What the growth of the run of decodes that is on the GPU takes until its end."""
        return self._reserved_blocks

    def under_way(self) -> Iterable[Job]:
        return self._instance.view.decoding

    def make_room(self) -> None:
        """Gives every decode the block that its next token needs; evicts while there is none."""
        own = self._instance
        own.view.evicted = False
        kv, decoding = own.kv, own.view.decodes
        size = kv.block_tokens
        first = 1 % size  # the place in its block of a token that needs a new one
        growing = [
            job for job in decoding.values() if (job.request.prompt_tokens + job.generated_tokens) % size == first
        ]
        for job in growing:
            context = job.context_tokens
            short = kv.blocks(context) - kv.held(job.id)
            while short > kv.free_blocks and job.id in decoding:
                self._evict_last()
            if job.id in decoding:
                kv.fill(job.id, (context - 1) // size, job.block_name)
                if short > 0:
                    kv.grow(job.id, short)

    def _evict_last(self) -> None:
        """The sequence admitted last that no batch holds loses its KV."""
        own = self._instance
        view = own.view
        candidates = reversed(self._admitted.values())
        job = next(job for job in candidates if job.id in view.decodes or job in view.waiting)
        if view.decodes.pop(job.id, None) is None:
            view.waiting.remove(job)
        del self._admitted[job.id]
        own.kv.give(job.id)
        view.sequences -= 1
        view.evicted = True
        job.evictions += 1
        job.lose_kv()
        view.waiting.add(job)
        own.log_kv()

    def take(self, batch: Batch) -> None:
        own = self._instance
        view, kv = own.view, own.kv
        view.evicted = False
        tokens = take_parts(own, batch, self._admit)
        for job in batch.decodes:
            if job.id not in view.decodes:
                view.waiting.remove(job)
                if not kv.held(job.id):  # what came with its KV has taken them
                    kv.take(job.id, kv.blocks(job.context_tokens), job.block_name)
                view.decodes[job.id] = job
                self._admit(job)
        decodes = context_of(batch.decodes) if batch.decodes else NO_DECODES
        batch.context = decodes
        if batch.layers is not None:
            lay_out(own, batch, batch.layers, tokens, decodes)
            return
        if batch.stops is not None:
            lay_out_stops(own, batch, batch.stops, tokens)
            return
        if tokens:
            batch.timeline = own.latency.timeline(tokens, batch.slowest, decodes)
        else:
            batch.timeline = own.latency.iterations(decodes, self._steps(batch), batch.slowest)
        batch.predicted_s = own.predictor.batch_s(tokens, decodes)

    def _admit(self, job: Job) -> None:
        self._instance.view.sequences += 1
        self._admitted[job.id] = job

    def _steps(self, batch: Batch) -> int:
        """How many iterations of its decodes a batch runs without a decision; reserves the blocks for them."""
        if self._most_steps == 1:
            self._reserved_blocks = 0
            return 1
        steps = min([job.request.output_tokens - job.generated_tokens for job in batch.decodes])
        steps = min(steps, self._most_steps or steps)
        free_blocks = self._instance.kv.free_blocks
        self._reserved_blocks = self._growth(batch, steps)
        if self._reserved_blocks > free_blocks:
            fitting = range(1, steps)  # the blocks of one step are held already
            steps = bisect_right(fitting, free_blocks, key=lambda middle: self._growth(batch, middle))
            self._reserved_blocks = self._growth(batch, steps)
        return steps

    def _growth(self, batch: Batch, steps: int) -> int:
        """Blocks that the decodes of a batch need for so many steps beyond those they hold, which `make_room` has
        given them: of the first."""
        size = self._instance.kv.block_tokens
        contexts = [job.request.prompt_tokens + job.generated_tokens - 1 for job in batch.decodes]
        return sum([(context + steps - 1) // size - context // size for context in contexts])

    def advance(self, batch: Batch) -> None:
        self._advance(batch, 1)

    def _advance(self, batch: Batch, steps: int) -> None:
        """Moves jobs to where they are after so many steps of the batch; their tokens are out when it ends."""
        own = self._instance
        view = own.view
        ending: list[Job] = []
        complete: list[Job] = []
        self._reserved_blocks = 0
        if steps > 1:
            size = own.kv.block_tokens
            for job in batch.decodes:
                context = job.request.prompt_tokens + job.generated_tokens - 1
                short = (context + steps - 1) // size - context // size
                if short:
                    own.kv.grow(job.id, short)
                    own.kv.fill(job.id, (context + steps) // size, job.block_name)
        for job in batch.decodes:
            job.generated_tokens += steps
            if job.generated_tokens >= job.request.output_tokens:
                ending.append(job)
                del view.decodes[job.id]
        for job, new in computed(own, batch):
            job.done_tokens += new
            if job.done_tokens < job.prompt_tokens:
                view.waiting.add(job)
                continue
            complete.append(job)
            job.generated_tokens += 1
            if job.generated_tokens < job.request.output_tokens:
                view.decodes[job.id] = job
            else:
                ending.append(job)
        for job in ending:
            del self._admitted[job.id]
        self._ending[batch.number], self._emitting[batch.number] = ending, complete

    def end(self, batch: Batch, operators: int) -> bool:
        """The batch's tokens are out: sequences that end give their blocks and slots back."""
        own = self._instance
        steps = 1 if batch.parts else operators // (5 * own.latency.profile.layers)
        if batch.number not in self._ending:
            self._advance(batch, steps)
        ending, complete = self._ending.pop(batch.number), self._emitting.pop(batch.number)
        token_s = own.view.now_s + own.latency.profile.request_s
        if batch.decodes or complete:
            self._count_tokens(batch, complete, steps, token_s)
        for job in complete:
            own.prefilled(job.request)
            if job.prefill_instance < 0:
                job.first_token_s = token_s
                job.prefill_instance = own.index
        for job in ending:
            self._close_run(job)
            own.kv.give(job.id)
            own.view.sequences -= 1
            own.log_request(job, token_s, Outcome.FINISHED)
            own.ended(job.request, token_s)
        return all(job.done_tokens >= job.prompt_tokens for job, _ in batch.parts)

    def _count_tokens(self, batch: Batch, complete: list[Job], steps: int, token_s: float) -> None:
        """Notes which steps gave a token to whom; a job's tokens of adjacent steps are one run."""
        own = self._instance
        first = own.log.steps_of(own.index, steps)
        after = first + steps
        timeline = batch.timeline
        if isinstance(timeline, Iterations):
            first_s, growth_s = timeline.first_s, timeline.growth_s
        else:
            first_s, growth_s = timeline.total_s, 0.0
        own.log.steps.add(
            (batch.number, own.index, first, steps, token_s, first_s, growth_s, *batch.context, batch.slowest)
        )
        for job in (*batch.decodes, *complete):
            if job.next_step != first:
                self._close_run(job)
                job.run_step = first
            job.next_step = after

    def lose(self, batch: Batch) -> None:
        own = self._instance
        complete = self._emitting.pop(batch.number, None)
        if complete is None:
            under_way(own, batch)
            return
        for job in (*batch.decodes, *complete):  # `advance` has counted their next tokens, which never came out
            job.generated_tokens -= 1

    def leave(self, job: Job) -> None:
        self._close_run(job)
        job.run_step = job.next_step = -1

    def _close_run(self, job: Job) -> None:
        if job.run_step >= 0:
            self._instance.log.tokens.add((job.id, self._instance.index, job.run_step, job.next_step))
