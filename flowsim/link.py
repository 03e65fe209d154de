"""KV on its way from the instance that computed it to the one that decodes. Knows SimPy; knows no policy.

As in DistServe (arXiv 2401.09670, 4.3) the decode side pulls: a prefill that has ended keeps its blocks, and so
waits in the memory of its own instance, until the other has blocks free for it; then the transfer is queued, and when
it ends the first instance gets its blocks back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import simpy

from flowsim.core import Job, Outcome
from flowsim.instance import Instance
from flowsim.log import Log
from flowsim.pool import Link

__all__ = ["Transfers"]


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
        self._asked: dict[
            int, deque[tuple[Job, Instance, float]]
        ] = {}  # by target, in the order of their prefills' end
        self._out_free_s: dict[int, float] = {}  # by source: when what was queued there has left
        self._in_free_s: dict[int, float] = {}
        self._moving: dict[int, tuple[Job, Instance]] = {}

    def ask(self, job: Job, source: Instance, target: Instance) -> None:
        """A prefill has ended on `source`, whose blocks it holds; `target` is to decode it."""
        self._asked.setdefault(target.index, deque()).append((job, source, self._env.now))
        self.pull(target)

    def pull(self, target: Instance) -> None:
        """Starts the transfers for which `target` has room, first come first served; called when blocks come free.

        What lost its KV to the growth of others there comes before any of them, and so does what the decodes that
        run grow by until one of them ends.
        """
        queue = self._asked.get(target.index)
        while queue and not any(job.left_tokens for job in target.view.waiting):
            job, source, asked_s = queue[0]
            blocks = target.kv.blocks(job.context_tokens)
            if target.kv.needs(job.block_name, blocks) > target.kv.free_blocks - target.stage.reserved_blocks():
                return
            queue.popleft()
            target.kv.take(job.id, blocks, job.block_name)
            target.log_kv()
            self._send(job, source, target, asked_s)

    def _send(self, job: Job, source: Instance, target: Instance, asked_s: float) -> None:
        """Queues a transfer at both ends: it starts when both are free."""
        link, now_s = self._link, self._env.now
        sent = job.request.prompt_tokens * source.latency.profile.kv_bytes_per_token
        start_s = max(now_s, self._out_free_s.get(source.index, 0.0), self._in_free_s.get(target.index, 0.0))
        left_s = start_s + sent / link.bytes_per_s
        self._out_free_s[source.index] = self._in_free_s[target.index] = left_s
        end_s = left_s + link.latency_s
        self._log.transfers.add((job.id, source.index, target.index, sent, asked_s, start_s, end_s))
        self._moving[job.id] = (job, source)
        arrival = simpy.Timeout(self._env, end_s - now_s)
        arrival.callbacks.append(lambda _: self._arrived(job, source, target))

    def _arrived(self, job: Job, source: Instance, target: Instance) -> None:
        del self._moving[job.id]
        source.release(job)
        target.join(job)

    def close(self) -> None:
        """The run is over: what is on its way is logged as unfinished."""
        for job, source in self._under_way():
            source.log_request(job, math.nan, Outcome.UNFINISHED)

    def _under_way(self) -> Iterator[tuple[Job, Instance]]:
        for queue in self._asked.values():
            yield from ((job, source) for job, source, _ in queue)
        yield from self._moving.values()
