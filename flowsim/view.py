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
    `layers` are the model's. `pausable` is False where a batch that runs goes to its end whatever the policy says, as
    batches are planned ahead, or ranks step together.
    """

    __slots__ = (
        "_alone_s",
        "_hardware",
        "_kv",
        "_predictor",
        "_prefills_alone",
        "arrived",
        "decodes",
        "evicted",
        "layers",
        "max_batches",
        "max_sequences",
        "now_s",
        "pausable",
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
        hardware: LatencyModel | None = None,
        *,
        max_batches: float = 128,
        max_sequences: float = math.inf,
        layers: int = 1,
        request_s: float = 0.0,
        pausable: bool = True,
    ) -> None:
        self.now_s = 0.0
        self.arrived: deque[Job] = deque(maxlen=ARRIVED)
        self.waiting: JobQueue[Job] = JobQueue(self)
        self.suspended: JobQueue[Batch] = JobQueue(self)
        self.running: Batch | None = None
        self.decodes: dict[int, Job] = {}
        self.sequences = 0
        self.evicted = False
        self.layers = layers
        self.pausable = pausable
        self.max_batches = max_batches
        self.max_sequences = max_sequences
        self._hardware = hardware
        self._predictor = predictor
        self._alone_s: dict[int, float] = {}  # what the predictor has answered
        self._kv = kv
        self._prefills_alone = not kv.remembers and max_sequences == math.inf  # each block is one sequence's own
        self.request_s = request_s

    @property
    def decoding(self) -> Sequence[Job]:
        """The jobs that can gain a token, in the order in which their prefills ended here."""
        return tuple(self.decodes.values())

    def left_s(self, work: Job | Batch) -> float:
        """Predicted seconds to the first token if `work` ran from now on, alone; never below 0.

        With P the predictor: a job that has not started has P(prompt); one between its chunks has
        P(prompt) - P(done tokens) + request_s; one between groups of layers less of what those tokens add, by the
        share of the layers done; a batch, running or suspended, has P(batch) less the seconds it has been busy.
        `pass_s`, `check_s` and `request_s` are included; for a job between its chunks the `pass_s` of its done tokens
        stands for that of the next chunk.
        """
        if work.is_waiting:
            left_s = self._alone_s.get(work.prompt_tokens)
            if left_s is None:
                left_s = self._alone_s[work.prompt_tokens] = max(0.0, self._predictor.alone_s(work.prompt_tokens))
            done_tokens = work.done_tokens
            if not (done_tokens or work.done_layers):
                if not self._kv.remembers:
                    return left_s
                done_tokens = cached_tokens(self._kv, work)
            if done_tokens:
                left_s += self.request_s - self._predictor.alone_s(done_tokens)
            if work.done_layers:
                before_s = self._predictor.alone_s(done_tokens) if done_tokens else self.request_s
                group_s = self._predictor.alone_s(done_tokens + work.layered_tokens) - before_s
                left_s -= work.done_layers / self.layers * group_s
        else:
            busy_s = work.done_s
            if work is self.running and self.now_s > work.since_s:
                busy_s += self.now_s - work.since_s
            left_s = work.predicted_s - busy_s
        return left_s if left_s > 0.0 else 0.0

    def cost_s(self, parts: Sequence[Part], decodes: Sequence[Job] = (), layers: range | None = None) -> float:
        """Predicted seconds from starting a batch of these parts and decodes to its first tokens.

        With `layers`: to its end, and of what the parts add to the decodes in a whole pass each layer takes its share.
        """
        tokens = [(part.tokens, part.job.done_tokens) for part in parts]
        if layers is not None:
            without_s = self._predictor.batch_s((), context_of(decodes)) if decodes else self.request_s
            return without_s + (self.cost_s(parts, decodes) - without_s) * len(layers) / self.layers
        if not decodes:
            return self._predictor.batch_s(tokens)
        return self._predictor.batch_s(tokens, context_of(decodes))

    def pauses(self, parts: Sequence[Part], stops: Stops) -> Pauses:
        """What a batch of these parts would pay for these stops, and how soon it could then be stopped.

        Of the profile of its operators, which predictions that err do not change. With several ranks a batch stops one
        stop later, at a barrier. Where no batch can be paused, whatever comes waits for the end.

        Raises:
            ValueError: the view was made without hardware.
        """
        hardware = self._hardware
        if hardware is None:
            raise ValueError("this view knows no operators; make it with InstanceView(predictor, kv, latency)")
        timeline = hardware.timeline([(part.tokens, part.job.done_tokens) for part in parts])
        checks_s = hardware.stopping(stops).checks_s(len(timeline.passes))
        if not self.pausable:
            return Pauses(checks_s, timeline.mean_wait_s(Stops.REQUEST))
        meets = hardware.tp > 1 and bool(stops.operators)
        wait_s = timeline.mean_wait_s(stops, passed=int(meets)) + (hardware.barrier_s if meets else 0.0)
        return Pauses(checks_s, wait_s)

    def fits(self, parts: Sequence[Part], decodes: Sequence[Job] = ()) -> bool:
        """Whether a batch of these may start now: its KV blocks are free, and a batch slot and sequence slots are.

        A job takes the blocks of its whole prompt when its prefill starts, and keeps them between chunks; one whose
        prefill was done elsewhere takes those of its context when it joins the decodes, if it has not come with them.
        """
        if len(self.suspended.by_id) + (self.running is not None) >= self.max_batches:
            return False
        kv = self._kv
        if decodes or not self._prefills_alone:
            return self._fits(parts, [job for job in decodes if job.id not in self.decodes])
        needed, block_tokens = 0, kv.block_tokens
        for job, _ in parts:
            if not (job.done_tokens or job.done_layers):
                needed -= -job.prompt_tokens // block_tokens
        return needed <= kv.free_blocks

    def _fits(self, parts: Sequence[Part], joining: Sequence[Job]) -> bool:
        """Whether blocks and sequence slots are; of decodes only those that are not sequences of this instance yet."""
        if self.blocks(parts, joining) > self._kv.free_blocks:
            return False
        starting = sum(not (job.done_tokens or job.done_layers) for job, _ in parts)
        return self.sequences + starting + len(joining) <= self.max_sequences

    def blocks(self, parts: Sequence[Part], decodes: Sequence[Job] = ()) -> int:
        """KV blocks that starting these would take."""
        needed, kv = 0, self._kv
        for job, _ in parts:
            if not (job.done_tokens or job.done_layers):
                blocks = kv.blocks(job.prompt_tokens)
                needed += kv.needs(job.block_name, blocks) if kv.remembers else blocks
        for job in decodes:
            if job.id not in self.decodes and not kv.held(job.id):
                needed += kv.blocks(job.context_tokens)
        return needed

    def completes(self, batch: Batch) -> bool:
        """Whether the tokens of a batch's prompts are computed when it ends: it takes them through the last layer."""
        return batch.layers is None or batch.layers.stop == self.layers

    def left_tokens(self, job: Job) -> int:
        """Prompt tokens that a job would still compute, were it to go on now: not those of blocks in the prefix cache.

        Of a whole prompt in the cache one block's worth is left, or less: the last token is always computed.
        """
        if job.done_tokens or job.done_layers or not self._kv.remembers:
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
