"""How a workload comes in: a list delivered at its arrival times, or a source whose arrivals depend on the run.

Knows SimPy; knows no instances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import simpy

from flowsim.core import Request
from flowsim.events import Alarm, Clock

__all__ = ["LATEST_S", "Arrivals", "Source", "SourceArrivals"]

LATEST_S = 1e7  # a float of seconds this large still tells nanoseconds apart


class Source(Protocol):
    """A workload whose arrivals depend on the run, such as users who wait for an answer before they ask again."""

    def __len__(self) -> int:
        """How many requests there will be in all."""
        ...

    def first(self) -> Sequence[Request]:
        """The requests that depend on nothing."""
        ...

    def after(self, request: Request, finish_s: float) -> Request | None:
        """The one that follows when a request ends at `finish_s`, arriving no earlier; None for none."""
        ...


class Arrivals:
    """Delivers a list of requests at their arrival times; each arrival schedules the next, so that the event queue
    stays small. `delivered` are those that have arrived, in order."""

    def __init__(self, env: Clock, requests: Sequence[Request]) -> None:
        self.delivered: list[Request] = []
        self._env = env
        self._rest: Iterator[Request] = iter(requests)
        self._alarm = Alarm(env, self._arrive)
        self._next: Request | None = next(self._rest, None)

    def start(self, deliver: Callable[[Request], None]) -> None:
        """Delivers them, each at its time."""
        self._deliver = deliver
        if self._next is not None:
            self._alarm.set(self._next.arrival_s)

    def ended(self, request: Request, finish_s: float) -> None:
        """Nothing follows from the end of a request."""

    def _arrive(self, _event: simpy.Event) -> None:
        request = self._next
        assert request is not None
        self._next = following = next(self._rest, None)
        if following is not None:  # set first, so that the instance knows whether more arrives at this instant
            delay_s = following.arrival_s - self._env.now_s
            self._alarm.set(delay_s if delay_s > 0.0 else 0.0)
        self.delivered.append(request)
        self._deliver(request)


class SourceArrivals:
    """Delivers what a source asks for; a request gets its id, its place among all, when it arrives."""

    def __init__(self, env: Clock, source: Source) -> None:
        self.delivered: list[Request] = []
        self._env = env
        self._source = source
        self._asked: list[Request] = []  # by id, as the source made them

    def start(self, deliver: Callable[[Request], None]) -> None:
        """Delivers them, each at its time."""
        self._deliver = deliver
        for request in self._source.first():
            self._schedule(request)

    def ended(self, request: Request, finish_s: float) -> None:
        """The end of a request may bring another."""
        following = self._source.after(self._asked[request.id], finish_s)
        if following is not None:
            self._schedule(following)

    def _schedule(self, request: Request) -> None:
        timer = simpy.Timeout(self._env, max(0.0, request.arrival_s - self._env.now))
        timer.callbacks.append(lambda _event: self._arrive(request))

    def _arrive(self, asked: Request) -> None:
        if self._env.now_s > LATEST_S:
            raise ValueError(
                f"request {len(self.delivered)} arrives at {self._env.now_s:g} s; the clock ends at {LATEST_S:g} s"
            )
        request = replace(asked, id=len(self.delivered), arrival_s=self._env.now)
        self._asked.append(asked)
        self.delivered.append(request)
        self._deliver(request)
