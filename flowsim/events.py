"""The kinds of event that SimPy lacks: after everything else of an instant, and at the multiples of a period."""

from __future__ import annotations

import math
from collections.abc import Callable

import simpy

from flowsim.timeline import INSTANT_S

__all__ = ["Later", "Poller"]

_AFTER_ARRIVALS = 2  # a SimPy priority below NORMAL: decided once everything else of the instant is in


class Later(simpy.Event):
    """An event that comes after everything else of its instant."""

    def __init__(self, env: simpy.Environment, callback: Callable[[simpy.Event], None], delay_s: float = 0.0) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        self.callbacks.append(callback)
        env.schedule(self, priority=_AFTER_ARRIVALS, delay=delay_s)  # type: ignore[arg-type]


class Poller:
    """Calls `poll` at the next multiple of a period once woken, and then at each for as long as that answers True."""

    def __init__(self, env: simpy.Environment, period_s: float, poll: Callable[[], bool]) -> None:
        self._env = env
        self._period_s = period_s
        self._poll = poll
        self._due = False

    def wake(self) -> None:
        """There is something to poll for."""
        if not self._due:
            self._set(math.ceil((self._env.now - INSTANT_S) / self._period_s))

    def _set(self, number: int) -> None:
        self._due = True
        Later(self._env, self._fire, max(0.0, number * self._period_s - self._env.now))

    def _fire(self, _event: simpy.Event) -> None:
        self._due = False
        if self._poll():
            self._set(math.floor((self._env.now + INSTANT_S) / self._period_s) + 1)
