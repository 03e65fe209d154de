"""Instances behind a router, fed with a workload. Knows SimPy; knows no policy by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import simpy

from flowsim.core import Request
from flowsim.instance import Instance

__all__ = ["Arrivals", "PrefillOnly", "RoundRobin", "Router", "Source", "SourceArrivals"]


MOST_INSTANCES = 10_000


class Router(Protocol):
    """Which instance takes a request."""

    def route(self, request: Request, instances: Sequence[Instance]) -> Instance: ...


class RoundRobin:
    """Each instance in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def route(self, request: Request, instances: Sequence[Instance]) -> Instance:
        instance = instances[self._turn % len(instances)]
        self._turn += 1
        return instance


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOnly:
    """A pool of prefill instances; a request ends with its first token.

    `kv_blocks` per instance (None: what GPU memory leaves beside the weights at `gpu_memory_fraction`) of
    `block_tokens` tokens; at most `max_batches` batches running and suspended on an instance; a batch longer
    than `pass_tokens` runs as several passes. `jitter_sigma` spreads the speed of each rank, drawn anew for each
    batch as exp(sigma z) with z standard normal; a group takes what its slowest rank takes.

    Raises:
        ValueError: a value out of its range.
    """

    instances: int = 1
    kv_blocks: int | None = None
    block_tokens: int = 16
    gpu_memory_fraction: float = 0.9
    max_batches: int = 128
    pass_tokens: int = 8192
    jitter_sigma: float = 0.0

    def __post_init__(self) -> None:
        for name in ("instances", "kv_blocks", "block_tokens", "max_batches", "pass_tokens"):
            value = getattr(self, name)
            if (value is not None or name != "kv_blocks") and not (isinstance(value, int) and value >= 1):
                raise ValueError(f"cluster.{name} is {value!r}; it must be a whole number, at least 1")
        if self.instances > MOST_INSTANCES:
            raise ValueError(f"cluster.instances is {self.instances}; at most {MOST_INSTANCES} are simulated at once")
        if not 0.0 < self.gpu_memory_fraction <= 1.0:
            raise ValueError(f"cluster.gpu_memory_fraction is {self.gpu_memory_fraction}; it must be within 0..1")
        if not 0.0 <= self.jitter_sigma <= 1.0:
            raise ValueError(f"cluster.jitter_sigma is {self.jitter_sigma}; it must be within 0..1")


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

    def __init__(self, env: simpy.Environment, requests: Sequence[Request], deliver: Callable[[Request], None]) -> None:
        self.delivered: list[Request] = []
        self._env = env
        self._rest: Iterator[Request] = iter(requests)
        self._deliver = deliver
        self._next: Request | None = None
        self._schedule()

    def ended(self, request: Request, finish_s: float) -> None:
        """Nothing follows from the end of a request."""

    def _schedule(self) -> None:
        self._next = next(self._rest, None)
        if self._next is not None:
            timer = simpy.Timeout(self._env, max(0.0, self._next.arrival_s - self._env.now))
            timer.callbacks.append(self._arrive)

    def _arrive(self, _event: simpy.Event) -> None:
        request = self._next
        assert request is not None
        self._schedule()  # first, so that the instance knows whether more arrives at this instant
        self.delivered.append(request)
        self._deliver(request)


class SourceArrivals:
    """Delivers what a source asks for; a request gets its id, its place among all, when it arrives."""

    def __init__(self, env: simpy.Environment, source: Source, deliver: Callable[[Request], None]) -> None:
        self.delivered: list[Request] = []
        self._env = env
        self._source = source
        self._deliver = deliver
        self._asked: list[Request] = []  # by id, as the source made them
        for request in source.first():
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
        request = replace(asked, id=len(self.delivered), arrival_s=self._env.now)
        self._asked.append(asked)
        self.delivered.append(request)
        self._deliver(request)
