"""What flowsim's hot paths need of SimPy: its clock as an attribute, and events to be set again and again, after
everything else of an instant, or at a period."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush

import simpy

from flowsim.timeline import INSTANT_S

__all__ = ["Alarm", "Clock", "Later", "Poller"]

NORMAL = simpy.events.NORMAL
_AFTER_ARRIVALS = 2  # a SimPy priority below NORMAL: decided once everything else of the instant is in


class Clock(simpy.Environment):
    """SimPy's environment with `now` as a plain attribute, `now_s`: it is looked at ten times an event."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def has_more(self) -> bool:
        """Whether something else happens at this instant."""
        return bool(self._queue) and self._queue[0][0] <= self.now_s

    def advance(self, until_s: float, events: int) -> int:
        """Processes up to so many events that come no later than `until_s`, as `step` does each; answers how many."""
        queue = self._queue
        for done in range(events):
            if not queue or queue[0][0] > until_s:
                return done
            at_s, _, _, event = heappop(queue)
            self.now_s = self._now = at_s
            callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]
            for callback in callbacks:
                callback(event)
        return events


class Alarm(simpy.Event):
    """An event that is set again once it has come: a third of what a new Timeout costs."""

    def __init__(self, env: Clock, callback: Callable[[simpy.Event], None]) -> None:
        super().__init__(env)
        self._clock = env
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
        clock = self._clock
        heappush(clock._queue, (clock.now_s + delay_s, NORMAL, next(clock._eid), self))


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
