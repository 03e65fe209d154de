"""What a policy sees of one instance, as plain state: no simulator needed to build one.

The Instance keeps it up to date; tests and users build their own (see `flowsim.testing`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from flowsim.core import Batch, Job, Part
from flowsim.kv import Blocks
from flowsim.latency import Decodes, LatencyModel, Predictor
from flowsim.policy import Pauses
from flowsim.queue import JobQueue
from flowsim.timeline import Stops

__all__ = ["ARRIVED", "InstanceView"]

ARRIVED = 64
"""The latest arrivals that a view remembers."""


class InstanceView:
    """What the scheduler of a real engine could know; it holds no output lengths. Policies only read it.

    `waiting` are jobs that do not run, in the order of arrival; `suspended` are batches paused at a stop;
    `running` is the batch on the GPU, or None. Where an instance decodes, `decoding` are the jobs past their prefill
    that gain a token with each batch they are in; `sequences` counts all that hold KV here:
    those, prompts between their chunks, and what the step that runs will end. `evicted` says that in
    making room for what runs next a sequence lost its KV to the growth of others.
    `arrived` are the latest requests that came here, at most `ARRIVED`, the oldest first, wherever they are now.
    `request_s` are the seconds of a first token that hold no GPU: work that ends at t is seen at t + request_s.
    """

    __slots__ = (
        "_hardware",
        "_kv",
        "_predictor",
        "arrived",
        "decodes",
        "evicted",
        "max_batches",
        "max_sequences",
        "now_s",
        "request_s",
        "running",
        "sequences",
        "suspended",
        "waiting",
    )

    def __init__(
        self,
        predictor: Predictor,
        kv: Blocks,
        *,
        max_batches: float = 128,
        max_sequences: float = math.inf,
        request_s: float = 0.0,
        hardware: LatencyModel | None = None,
    ) -> None:
        self.now_s = 0.0
        self.arrived: deque[Job] = deque(maxlen=ARRIVED)
        self.waiting: JobQueue[Job] = JobQueue(self)
        self.suspended: JobQueue[Batch] = JobQueue(self)
        self.running: Batch | None = None
        self.decodes: dict[int, Job] = {}
        self.sequences = 0
        self.evicted = False
        self.max_batches = max_batches
        self.max_sequences = max_sequences
        self._hardware = hardware
        self._predictor = predictor
        self._kv = kv
        self.request_s = request_s

    @property
    def decoding(self) -> Sequence[Job]:
        """The jobs that can gain a token, in the order in which their prefills ended here."""
        return tuple(self.decodes.values())

    def left_s(self, work: Job | Batch) -> float:
        """Predicted seconds to the first token if `work` ran from now on, alone; never below 0.

        With P the predictor: a job that has not started has P(prompt); one between its chunks has
        P(prompt) - P(done tokens) + request_s; a batch, running or suspended, has P(batch) less the seconds it
        has been busy. `pass_s`, `check_s` and `request_s` are included; for a job between its chunks the `pass_s` of
        its done tokens stands for that of the next chunk.
        """
        if isinstance(work, Job):
            left_s = self._predictor.alone_s(work.prompt_tokens)
            done_tokens = work.done_tokens
            if not done_tokens and self._kv.remembers:
                done_tokens = cached_tokens(self._kv, work)
            if done_tokens:
                left_s += self.request_s - self._predictor.alone_s(done_tokens)
        else:
            busy_s = work.done_s
            if work is self.running and self.now_s > work.since_s:
                busy_s += self.now_s - work.since_s
            left_s = work.predicted_s - busy_s
        return left_s if left_s > 0.0 else 0.0

    def cost_s(self, parts: Sequence[Part], decodes: Sequence[Job] = ()) -> float:
        """Predicted seconds from starting a batch of these parts and decodes to its first tokens."""
        tokens = [(part.tokens, part.job.done_tokens) for part in parts]
        if not decodes:
            return self._predictor.batch_s(tokens)
        return self._predictor.batch_s(tokens, context_of(decodes))

    def pauses(self, parts: Sequence[Part], stops: Stops) -> Pauses:
        """What a batch of these parts pays for being stoppable at these stops, and what that is worth to who comes.

        Read from the operators' profile, which predictors that err do not change.
        """
        hardware = self._hardware
        if hardware is None:
            raise ValueError("this view knows no operators: give InstanceView its hardware")
        timeline = hardware.timeline([(part.tokens, part.job.done_tokens) for part in parts])
        wait_s = timeline.mean_wait_s(stops, passed=1 if hardware.tp > 1 and stops.operators else 0)
        barrier_s = hardware.barrier_s if hardware.tp > 1 and stops.operators else 0.0
        return Pauses(hardware.stopping(stops).checks_s(len(timeline.passes)), wait_s + barrier_s)

    def fits(self, parts: Sequence[Part], decodes: Sequence[Job] = ()) -> bool:
        """Whether a batch of these may start now: its KV blocks are free, and a batch slot and sequence slots are.

        A job takes the blocks of its whole prompt when its prefill starts, and keeps them between chunks; one whose
        prefill was done elsewhere takes those of its context when it joins the decodes, if it has not come with them.
        """
        if decodes:
            decodes = [job for job in decodes if job.id not in self.decodes]
        if self.blocks(parts, decodes) > self._kv.free_blocks:
            return False
        if len(self.suspended) + (self.running is not None) >= self.max_batches:
            return False
        return self.max_sequences == math.inf or self.sequences + self._joining(parts, decodes) <= self.max_sequences

    def _joining(self, parts: Sequence[Part], decodes: Sequence[Job]) -> int:
        """How many of these parts, and of these decodes that are to join, are no sequence of this instance yet."""
        return sum(not job.done_tokens for job, _ in parts) + len(decodes)

    def blocks(self, parts: Sequence[Part], decodes: Sequence[Job] = ()) -> int:
        """KV blocks that starting these would take."""
        needed, kv = 0, self._kv
        for job, _ in parts:
            if not job.done_tokens:
                blocks = kv.blocks(job.prompt_tokens)
                needed += kv.needs(job.block_name, blocks) if kv.remembers else blocks
        for job in decodes:
            if job.id not in self.decodes and not kv.held(job.id):
                needed += kv.blocks(job.context_tokens)
        return needed

    def left_tokens(self, job: Job) -> int:
        """Prompt tokens that a job would still compute, were it to go on now: not those of blocks in the prefix cache.

        Of a whole prompt in the cache one block's worth is left, or less: the last token is always computed.
        """
        if job.done_tokens or not self._kv.remembers:
            return job.left_tokens
        return job.prompt_tokens - cached_tokens(self._kv, job)

    @property
    def free_blocks(self) -> int:
        """KV blocks free now."""
        return self._kv.free_blocks


def context_of(decodes: Sequence[Job]) -> Decodes:
    """What these jobs attend to in the next step of all of them."""
    contexts = [job.request.prompt_tokens + job.generated_tokens for job in decodes]
    return Decodes(len(contexts), sum(contexts), max(contexts))


def cached_tokens(kv: Blocks, job: Job) -> int:
    """Leading tokens of a prompt that a pool remembers: whole blocks, and never all of it."""
    return kv.block_tokens * kv.hits(job.block_name, (job.prompt_tokens - 1) // kv.block_tokens)
