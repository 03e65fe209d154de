"""KV on its way from the instance that computed it to the one that decodes. Knows SimPy; knows no policy.

As in DistServe (arXiv 2401.09670, 4.3) the decode side pulls: a prefill that has ended keeps its blocks, and so
waits in the memory of its own instance, until the other has blocks free for it; then the transfer is queued, and when
it ends the first instance gets its blocks back. Where that end fails, the first still has them and asks another; where
the first fails, the KV is lost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import simpy

from flowsim.core import Job, Outcome
from flowsim.instance import Instance
from flowsim.log import Log
from flowsim.pool import Link

__all__ = ["Handover", "Transfers"]


@dataclass(slots=True, eq=False)
class Handover:
    """A job whose prefill ended on `source` at `asked_s`, and which `target` is to decode: its transfer, once queued,
    starts at `start_s`, and its last byte leaves at `left_s`."""

    job: Job
    source: Instance
    target: Instance
    asked_s: float
    sent_bytes: float = 0.0
    start_s: float = math.inf
    left_s: float = math.inf


class Transfers:
    """All transfers of a run.

    Args:
        env: the simulation's clock.
        link: what each instance has, in and out.
        log: gets a row for each transfer that starts.
    """

    def __init__(self, env: simpy.Environment, link: Link, log: Log) -> None:
        self._env = env
        self._link = link
        self._log = log
        self._asked: dict[int, deque[Handover]] = {}  # by target, in the order of their prefills' end
        self._out_free_s: dict[int, float] = {}  # by source: when what was queued there has left
        self._in_free_s: dict[int, float] = {}
        self._moving: dict[int, Handover] = {}
        self._down: set[int] = set()

    def ask(self, job: Job, source: Instance, target: Instance, asked_s: float) -> None:
        """A prefill ended at `asked_s` on `source`, whose blocks it holds; `target` is to decode it."""
        self._asked.setdefault(target.index, deque()).append(Handover(job, source, target, asked_s))
        self.pull(target)

    def pull(self, target: Instance) -> None:
        """Starts the transfers for which `target` has room, first come first served; called when blocks come free.

        What lost its KV to the growth of others there comes before any of them, and so does what the decodes that
        run grow by until one of them ends.
        """
        queue = self._asked.get(target.index)
        if target.index in self._down:
            return
        while queue and not any(job.left_tokens for job in target.view.waiting):
            job = queue[0].job
            blocks = target.kv.blocks(job.context_tokens)
            if target.kv.needs(job.block_name, blocks) > target.kv.free_blocks - target.stage.reserved_blocks():
                return
            target.kv.take(job.id, blocks, job.block_name)
            target.log_kv()
            self._send(queue.popleft())

    def _send(self, handover: Handover) -> None:
        """Queues a transfer at both ends: it starts when both are free."""
        link, now_s, source, target = self._link, self._env.now, handover.source.index, handover.target.index
        handover.sent_bytes = handover.job.prompt_tokens * handover.source.latency.profile.kv_bytes_per_token
        handover.start_s = max(now_s, self._out_free_s.get(source, 0.0), self._in_free_s.get(target, 0.0))
        handover.left_s = handover.start_s + handover.sent_bytes / link.bytes_per_s
        self._out_free_s[source] = self._in_free_s[target] = handover.left_s
        self._moving[handover.job.id] = handover
        arrival = simpy.Timeout(self._env, handover.left_s + link.latency_s - now_s)
        arrival.callbacks.append(lambda _: self._arrived(handover))

    def _arrived(self, handover: Handover) -> None:
        job = handover.job
        if self._moving.get(job.id) is not handover:
            return  # one of its ends has failed
        del self._moving[job.id]
        self._log_end(handover)
        handover.source.release(job)
        handover.target.join(job)

    def fail(self, index: int) -> tuple[list[Handover], list[Handover]]:
        """An instance stops: nothing arrives there, or from there.

        Answers the handovers whose KV was there and is lost, and those whose KV is still where it was computed.
        """
        self._down.add(index)
        self._out_free_s.pop(index, None)
        self._in_free_s.pop(index, None)
        ended = [one for one in self._under_way() if index in (one.source.index, one.target.index)]
        moving = [one for one in ended if self._moving.get(one.job.id) is one]
        for one in ended:
            self._log_end(one, failed=True)
        self._withdraw(ended)
        for one in moving:
            if one.source.index == index:  # the other end had taken blocks for it
                one.target.release(one.job)
                self.pull(one.target)
        return [one for one in ended if one.source.index == index], [one for one in ended if one.source.index != index]

    def resume(self, index: int, pool: Collection[int]) -> list[Handover]:
        """An instance of a pool is up again; answers what was asked of others there that are down."""
        self._down.discard(index)
        waiting = [one for one in self._under_way() if one.target.index in self._down and one.target.index in pool]
        waiting += self._asked.get(index, ())
        self._withdraw(waiting)
        return sorted(waiting, key=lambda one: one.asked_s)

    def _withdraw(self, handovers: Collection[Handover]) -> None:
        gone = {one.job.id for one in handovers}
        self._moving = {number: one for number, one in self._moving.items() if number not in gone}
        self._asked = {
            target: deque(one for one in queue if one.job.id not in gone) for target, queue in self._asked.items()
        }

    def _log_end(self, one: Handover, *, failed: bool = False) -> None:
        """A transfer arrives when it was due, or fails now, with what has left by then: nothing before it starts."""
        link, now_s = self._link, self._env.now
        start_s, sent_bytes, end_s = one.start_s, one.sent_bytes, one.left_s + link.latency_s
        if failed:
            if now_s < one.left_s:
                sent_bytes = (now_s - start_s) * link.bytes_per_s if now_s > start_s else 0.0
            start_s, end_s = min(start_s, now_s), now_s
        self._log.transfers.add(
            (one.job.id, one.source.index, one.target.index, sent_bytes, one.asked_s, start_s, end_s, failed)
        )

    def close(self) -> None:
        """The run is over: what is on its way is logged as unfinished."""
        for one in self._under_way():
            if one.job.id in self._moving:
                self._log_end(one)
            one.source.log_request(one.job, math.nan, Outcome.UNFINISHED)

    def _under_way(self) -> list[Handover]:
        return [*(one for queue in self._asked.values() for one in queue), *self._moving.values()]
