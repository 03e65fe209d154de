"""Carries out the moves that a router asks for. Knows SimPy and no router by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import simpy

from flowsim.events import Later
from flowsim.log import Log
from flowsim.proxied import Proxied
from flowsim.router import Move, Rebalancer
from flowsim.stage import has_started

__all__ = ["Moving"]

BEFORE_DECISIONS = -1


class Moving:
    """Asks a router what is to wait elsewhere, once in an instant in which something came or ended.

    Args:
        env: the simulation's clock.
        router: what is asked.
        log: gets a row for each move.
        live: the instances that are up.
    """

    def __init__(
        self, env: simpy.Environment, router: Rebalancer, log: Log, live: Callable[[], Sequence[Proxied]]
    ) -> None:
        self._env = env
        self._router = router
        self._log = log
        self._live = live
        self._due = False

    def changed(self) -> None:
        """Something came or ended: the router is asked later in this instant, before any decision."""
        if not self._due:
            self._due = True
            Later(self._env, self._ask, turn=BEFORE_DECISIONS)

    def _ask(self, _event: simpy.Event) -> None:
        self._due = False
        pools: dict[str, list[Proxied]] = {}
        for server in self._live():
            pools.setdefault(server.pool, []).append(server)
        for servers in pools.values():
            if len(servers) > 1:
                for move in self._router.rebalance(servers, self._env.now):
                    self._move(move, servers)

    def _move(self, move: Move, servers: Sequence[Proxied]) -> None:
        job, source, target = move
        if not (isinstance(source, Proxied) and isinstance(target, Proxied)) or not {source, target} <= {*servers}:
            name = type(self._router).__name__
            raise ValueError(f"{name}.rebalance answered {move!r:.80}; both ends must be servers that it was given")
        waiting = source.instance.view.waiting
        if source is target or job not in waiting or has_started(job) or job is source.instance.flagged_for:
            return
        waiting.remove(job)
        job.migrations += 1
        self._log.migrations.add((job.id, source.index, target.index, self._env.now))
        source.left(job.request)
        target.take_over(job)
