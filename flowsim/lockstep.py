"""Instances that step together: the ranks of a data-parallel group that share their experts.

Every rank has its own queue, policy and KV. A step of the group begins when the one before it is over, with what each
rank has to run then; a rank with nothing runs a dummy batch of one token. In each layer the ranks gather the tokens of
all, compute their shares of the experts, and scatter the sums, so that all end with the slowest. This module knows no
policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import simpy

from flowsim.core import Batch, PolicyError
from flowsim.events import Later

__all__ = ["Lockstep", "Rank"]

DUMMY_TOKENS = 1


class Rank(Protocol):
    """What a group needs of an instance: that it ends its batch, and that it looks for one."""

    def over(self) -> None: ...
    def wake(self) -> None: ...


class Lockstep:
    """The clock of a group of ranks.

    Args:
        env: the simulation's clock.
        exchange_s: seconds that a step takes beyond what a rank computes for its own tokens, from those and the
            tokens of all ranks: the others' tokens in its experts, and the exchanges.
    """

    def __init__(self, env: simpy.Environment, exchange_s: Callable[[int, int], float]) -> None:
        self.busy = False
        self._env = env
        self._exchange_s = exchange_s
        self._ranks: list[Rank] = []
        self._ready: list[tuple[Rank, Batch]] = []
        self._launching = False

    def join(self, rank: Rank) -> None:
        """A rank belongs to the group."""
        self._ranks.append(rank)

    def run(self, rank: Rank, batch: Batch) -> None:
        """A rank has a batch for the step that begins at this instant.

        Raises:
            PolicyError: its prompts go through some of the layers only, so that layers differ in tokens.
        """
        if batch.layers is not None:
            raise PolicyError(
                "ranks that share experts run whole passes; choose another policy, or expert_parallel=false"
            )
        self._ready.append((rank, batch))
        if not self._launching:
            self._launching = True
            Later(self._env, self._launch, turn=1)  # once all that is decided at this instant is

    def _launch(self, _event: simpy.Event) -> None:
        """The step begins: all ranks have said what they run."""
        self._launching, self.busy = False, True
        idle = len(self._ranks) - len(self._ready)
        tokens = sum(batch.tokens for _, batch in self._ready) + DUMMY_TOKENS * idle
        step_s = max(batch.timeline.total_s + self._exchange_s(batch.tokens, tokens) for _, batch in self._ready)
        simpy.Timeout(self._env, step_s).callbacks.append(self._over)

    def _over(self, _event: simpy.Event) -> None:
        """The step is over on all ranks; those that had nothing may have something now."""
        ready, self._ready, self.busy = self._ready, [], False
        for rank, _ in ready:
            rank.over()
        had_work = {id(rank) for rank, _ in ready}
        for rank in self._ranks:
            if id(rank) not in had_work:
                rank.wake()
