"""Which instance takes a request: what a router sees of an instance, and the shipped routers.

A router is a proxy before the instances. It knows what a real one can: the request it was given, and of each instance
what was sent there, what has come back, and the queue. It must not know output lengths, nor how long anything
will really take. No simulator here, and no policy by name.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from flowsim.core import Job, Request
from flowsim.names import unknown
from flowsim.policy import View

__all__ = [
    "FewestRequests", "LeastWork", "Move", "PowerOfTwo", "PrefixAffinity", "Rebalancer", "RoundRobin", "Router",
    "Server", "SlackAware", "TwoTrack",
]  # fmt: skip


class Server(Protocol):
    """What a router may know of an instance.

    `index` counts the instances of all pools from 0; `pool` is its pool's name; `view` its queue, as its policy sees
    it; `requests` how many were sent there and have not ended.
    """

    @property
    def index(self) -> int: ...
    @property
    def pool(self) -> str: ...
    @property
    def view(self) -> View: ...
    @property
    def requests(self) -> int: ...

    def outstanding_s(self) -> float:
        """Predicted seconds of prefill sent there and not done: of each prompt without a first token what it takes
        alone, less what the running and the suspended batches have had of it."""
        ...

    def predicted_s(self, prompt_tokens: int) -> float:
        """Predicted seconds of one prompt alone there, to its first token."""
        ...


class Router(Protocol):
    """Which instance takes a request. `servers` are those that are up, in the order of their index, or all where
    none is; there is at least one. A run starts from a copy of the router, in the state that it was given in."""

    def route(self, request: Request, servers: Sequence[Server]) -> Server: ...


class Move(NamedTuple):
    """A job that waits on `source` is to wait on `target` instead."""

    job: Job
    source: Server
    target: Server


@runtime_checkable
class Rebalancer(Protocol):
    """A router that also moves what waits. It is asked after each arrival and each end of a request, once everything
    else of the instant is in and before any policy decides; a job that has started, or that the running batch is being
    stopped for, stays where it is. Pools are kept apart."""

    def rebalance(self, servers: Sequence[Server], now_s: float) -> Sequence[Move]:
        """The moves to make at `now_s`, a job in one of them at most; `servers` are those of one pool that are up, two
        at least."""
        ...


class RoundRobin:
    """Each instance in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def route(self, request: Request, servers: Sequence[Server]) -> Server:
        server = servers[self._turn % len(servers)]
        self._turn += 1
        return server


class FewestRequests:
    """The instance with the fewest requests that have not ended; the lowest index among equals."""

    def route(self, request: Request, servers: Sequence[Server]) -> Server:
        return min(servers, key=lambda server: server.requests)


class LeastWork:
    """The instance where the request's first token is predicted first if prompts ran one after the other: least
    outstanding work, and on unequal GPUs its own time there. The lowest index among equals."""

    def route(self, request: Request, servers: Sequence[Server]) -> Server:
        return min(servers, key=lambda server: server.outstanding_s() + server.predicted_s(request.prompt_tokens))


class PowerOfTwo:
    """The one with less work of two instances drawn at random (Mitzenmacher, 2001): O(1) a request.

    Draws from child 2 of `SeedSequence(seed)`, which is kept for routing.
    """

    def __init__(self, seed: int = 0) -> None:
        self._stream = random.Random(np.random.SeedSequence(seed, spawn_key=(2,)).generate_state(4).tobytes())

    def route(self, request: Request, servers: Sequence[Server]) -> Server:
        if len(servers) < 2:
            return servers[0]
        first = self._stream.randrange(len(servers))
        second = self._stream.randrange(len(servers) - 1)
        second += second >= first
        return LeastWork().route(request, [servers[one] for one in sorted((first, second))])


class SlackAware:
    """The busiest instance whose queue still meets the request's deadline, with `margin` of its SLO to spare; where
    none does, or the request has none, the one with least work.

    It keeps the least busy instances for requests with tight deadlines. A queue is taken as first come first served,
    so what an instance's policy would do for the request by its deadline is left out.

    Raises:
        ValueError: `margin` outside 0..1.
    """

    def __init__(self, margin: float = 0.2) -> None:
        if not 0.0 <= margin <= 1.0:
            raise ValueError(f"router.margin is {margin}; it must be within 0..1")
        self.margin = margin

    def route(self, request: Request, servers: Sequence[Server]) -> Server:
        allowed_s = (1.0 - self.margin) * request.ttft_slo_s
        least, busiest = servers[0], None
        least_s, busiest_s = float("inf"), -1.0
        for server in servers:
            ttft_s = server.outstanding_s() + server.predicted_s(request.prompt_tokens)
            if ttft_s < least_s:
                least, least_s = server, ttft_s
            if busiest_s < ttft_s <= allowed_s < float("inf"):
                busiest, busiest_s = server, ttft_s
        return busiest or least


class TwoTrack:
    """Two pools: the request's class says which, or else its length; within the pool another router decides.

    Args:
        short: the pool for prompts of up to `threshold_tokens`.
        long: the pool for longer ones.
        threshold_tokens: where the two part.
        classes: SLO classes with a pool of their own, whatever the length.
        within: how an instance of the pool is chosen; LeastWork unless given.

    Raises:
        ValueError: a threshold below 1; when a request comes, a pool that the cluster does not have.
    """

    def __init__(
        self,
        *,
        short: str = "realtime",
        long: str = "batch",
        threshold_tokens: int = 4096,
        classes: Mapping[str, str] | None = None,
        within: Router | None = None,
    ) -> None:
        if not isinstance(threshold_tokens, int) or threshold_tokens < 1:
            raise ValueError(f"router.threshold_tokens is {threshold_tokens!r}; it must be a whole number, at least 1")
        self.short = short
        self.long = long
        self.threshold_tokens = threshold_tokens
        self.classes = dict(classes or {})
        self.within = within or LeastWork()

    def route(self, request: Request, servers: Sequence[Server]) -> Server:
        by_length = self.short if request.prompt_tokens <= self.threshold_tokens else self.long
        name = self.classes.get(request.slo_class, by_length)
        inside = [server for server in servers if server.pool == name]
        return self.within.route(request, inside or servers)  # the other track where this one is down

    def check_pools(self, pools: Sequence[str]) -> None:
        """Asked once before a run.

        Raises:
            ValueError: a pool that is named here and not there.
        """
        for name in {self.short, self.long, *self.classes.values()}:
            if name not in pools:
                raise ValueError(unknown("pool", name, pools, where="of router=two_track"))


class PrefixAffinity:
    """The instance where the first token is predicted first, given the blocks that each is believed to have cached:
    outstanding work, and the predicted time of what is not cached (Mooncake's cache-aware rule, arXiv 2407.00079).

    The router believes that an instance has cached the last `memory_blocks` blocks that it was sent: a guess, as a
    proxy's is. Without `prefix_hashes` it is LeastWork.

    Raises:
        ValueError: an argument below 1.
    """

    def __init__(self, *, memory_blocks: int = 20_000, block_tokens: int = 16) -> None:
        for name, value in (("memory_blocks", memory_blocks), ("block_tokens", block_tokens)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"router.{name} is {value!r}; it must be a whole number, at least 1")
        self.memory_blocks = memory_blocks
        self.block_tokens = block_tokens
        self._sent: dict[int, OrderedDict[int, None]] = {}  # by instance, the least recently sent first

    def route(self, request: Request, servers: Sequence[Server]) -> Server:
        best = min(servers, key=lambda server: self._ttft_s(request, server))
        self._remember(request, best)
        return best

    def _ttft_s(self, request: Request, server: Server) -> float:
        cached = min(self.block_tokens * self._cached_blocks(request, server), request.prompt_tokens - 1)
        whole_s = server.predicted_s(request.prompt_tokens)
        return server.outstanding_s() + whole_s - (server.predicted_s(cached) if cached else 0.0)

    def _cached_blocks(self, request: Request, server: Server) -> int:
        """Leading blocks believed cached; an id names all that precedes it, so that a bisection finds the last."""
        sent: Mapping[int, None] = self._sent.get(server.index, {})
        hashes = request.prefix_hashes
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if hashes[middle - 1] in sent else (low, middle - 1)
        return low

    def _remember(self, request: Request, server: Server) -> None:
        sent = self._sent.setdefault(server.index, OrderedDict())
        for block in reversed(request.prefix_hashes):  # the tail is forgotten first
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > self.memory_blocks:
            sent.popitem(last=False)
