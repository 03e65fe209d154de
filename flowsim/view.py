"""What a policy sees of one instance, as plain state: no simulator needed to build one.

The Instance keeps it up to date; tests and users build their own (see `flowsim.testing`).
"""

from __future__ import annotations

from collections.abc import Sequence

from flowsim.core import Batch, Job, Part
from flowsim.kv import KVPool
from flowsim.latency import Predictor
from flowsim.queue import JobQueue

__all__ = ["InstanceView"]


class InstanceView:
    """What the scheduler of a real engine could know; it holds no output lengths. Policies only read it.

    `waiting` are jobs that do not run, in the order of arrival; `suspended` are batches paused at a stop;
    `running` is the batch on the GPU, or None; `decoding` are jobs past their prefill (colocated engines only).
    """

    __slots__ = (
        "_kv",
        "_predictor",
        "_request_s",
        "decoding",
        "max_batches",
        "now_s",
        "running",
        "suspended",
        "waiting",
    )

    def __init__(self, predictor: Predictor, kv: KVPool, *, max_batches: int = 128, request_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.waiting: JobQueue[Job] = JobQueue(self)
        self.suspended: JobQueue[Batch] = JobQueue(self)
        self.running: Batch | None = None
        self.decoding: Sequence[Job] = ()
        self.max_batches = max_batches
        self._predictor = predictor
        self._kv = kv
        self._request_s = request_s

    def left_s(self, work: Job | Batch) -> float:
        """Predicted seconds to the first token if `work` ran from now on, alone; never below 0.

        With P the predictor: a job that has not started has P(prompt); one between its chunks has
        P(prompt) - P(done tokens) + request_s; a batch, running or suspended, has P(batch) less the seconds it
        has been busy. `pass_s`, `check_s` and `request_s` are included; for a job between its chunks the `pass_s` of
        its done tokens stands for that of the next chunk.
        """
        if isinstance(work, Job):
            left_s = self._predictor.alone_s(work.prompt_tokens)
            if work.done_tokens:
                left_s += self._request_s - self._predictor.alone_s(work.done_tokens)
        else:
            busy_s = work.done_s
            if work is self.running and self.now_s > work.since_s:
                busy_s += self.now_s - work.since_s
            left_s = work.predicted_s - busy_s
        return left_s if left_s > 0.0 else 0.0

    def cost_s(self, parts: Sequence[Part], decodes: Sequence[Job] = ()) -> float:
        """Predicted seconds from starting a batch of these parts to its first tokens."""
        assert not decodes, "this instance runs no decodes"
        return self._predictor.batch_s([(part.tokens, part.job.done_tokens) for part in parts])

    def fits(self, parts: Sequence[Part]) -> bool:
        """Whether a batch of these parts may start now: its KV blocks are free, and a batch slot is.

        A job takes the blocks of its whole prompt when its prefill starts, and keeps them between chunks.
        """
        under_way = len(self.suspended) + (self.running is not None)
        return under_way < self.max_batches and self.blocks(parts) <= self._kv.free_blocks

    def blocks(self, parts: Sequence[Part]) -> int:
        """KV blocks that starting these parts would take."""
        needed = 0
        for job, _ in parts:
            if not job.done_tokens:
                needed += self._kv.blocks(job.prompt_tokens)
        return needed

    @property
    def free_blocks(self) -> int:
        """KV blocks free now."""
        return self._kv.free_blocks
