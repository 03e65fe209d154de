"""Two kinds of event that SimPy lacks: one to be set again and again, one after everything else of its instant."""

from __future__ import annotations

from collections.abc import Callable

import simpy

__all__ = ["Alarm", "Later"]

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
    """An event that comes after everything else of its instant."""

    def __init__(self, env: simpy.Environment, callback: Callable[[simpy.Event], None], delay_s: float = 0.0) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        self.callbacks.append(callback)
        env.schedule(self, priority=_AFTER_ARRIVALS, delay=delay_s)  # type: ignore[arg-type]
