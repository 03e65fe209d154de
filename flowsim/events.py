"""Kinds of event that SimPy lacks: to be set again and again, after everything else of an instant, at a period."""

from __future__ import annotations

import math
from collections.abc import Callable

import simpy

from flowsim.timeline import INSTANT_S

__all__ = ["Alarm", "Later", "Poller"]

_AFTER_ARRIVALS = 2  # a SimPy priority below NORMAL: decided once everything else of the instant is in


class Alarm(simpy.Event):
    """An event that is set again once it has come: a third of what a new Timeout costs."""

    def __init__(self, env: simpy.Environment, callback: Callable[[simpy.Event], None]) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        self._all = [callback]
        self.callbacks = None  # type: ignore[assignment]  # what SimPy leaves of an event that has come

    @property
    def is_set(self) -> bool:
        """Whether it is still to come."""
        return self.callbacks is not None

    def set(self, delay_s: float) -> None:
        """Lets it come after so many seconds; it must not be set already."""
        self.callbacks = self._all
        self.env.schedule(self, delay=delay_s)


class Later(simpy.Event):
    """An event that comes after everything else of its instant, and those of a lower `turn` first."""

    def __init__(
        self, env: simpy.Environment, callback: Callable[[simpy.Event], None], delay_s: float = 0.0, turn: int = 0
    ) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        self.callbacks.append(callback)
        env.schedule(self, priority=_AFTER_ARRIVALS + turn, delay=delay_s)  # type: ignore[arg-type]


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
