"""The one kind of event that SimPy lacks: after everything else of its instant."""

from __future__ import annotations

from collections.abc import Callable

import simpy

__all__ = ["Later"]

_AFTER_ARRIVALS = 2  # a SimPy priority below NORMAL: decided once everything else of the instant is in


class Later(simpy.Event):
    """An event that comes after everything else of its instant."""

    def __init__(self, env: simpy.Environment, callback: Callable[[simpy.Event], None], delay_s: float = 0.0) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        self.callbacks.append(callback)
        env.schedule(self, priority=_AFTER_ARRIVALS, delay=delay_s)  # type: ignore[arg-type]
