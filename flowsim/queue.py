"""Work in the order that a policy asks for. Knows orders only as functions; no policy by name, no clock.

An order is `order(work, view) -> key`, smallest key first; ties go to the lower id. Called on every piece of
work it costs O(n) a decision, which is fine for an experiment. An order whose keys stand still, or change
at known times, says so with `@indexed`, and the queue keeps a sorted index for it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from sortedcontainers import SortedList

__all__ = ["JobQueue", "Order", "indexed"]


class Work(Protocol):
    """A Job or a Batch."""

    @property
    def id(self) -> int: ...


class Clock(Protocol):
    """The part of a View that an index needs: the time of the decision."""

    now_s: float


W = TypeVar("W", bound=Work)
Order = Callable[[Any, Any], Any]
"""`order(work, view) -> key`: any value that compares, smallest first."""


def indexed(flips_s: Callable[[Any, Any], float] | None = None) -> Callable[[Order], Order]:
    """Declares that an order's key for work that does not run stands still, or changes at known times only.

    Args:
        flips_s: `flips_s(work, view)`, the simulated time in seconds at which the key changes next (a time that
            has passed, or inf: not again); None where keys never change.
    """

    def declare(order: Order) -> Order:
        order.flips_s = flips_s or _never  # type: ignore[attr-defined]
        return order

    return declare


def _never(_work: Work, _view: object) -> float:
    return math.inf


class JobQueue(Generic[W]):
    """Jobs that wait, or batches that are suspended; at most one piece of work for an id."""

    __slots__ = ("_index", "_view", "_work")

    def __init__(self, view: Clock) -> None:
        self._view = view
        self._work: dict[int, W] = {}
        self._index: dict[Order, _Index[W]] = {}

    def __len__(self) -> int:
        return len(self._work)

    def __iter__(self) -> Iterator[W]:
        """In order of arrival."""
        return iter(sorted(self._work.values(), key=lambda work: work.id))

    def __contains__(self, work: object) -> bool:
        return self._work.get(getattr(work, "id", -1)) is work

    def by(self, order: Order) -> Iterator[W]:
        """The work in an order, as of the view's `now_s`; not to be changed while it is walked."""
        index = self._indexed(order)
        if index is not None:
            return (entry[2] for entry in index.entries())
        keyed = [(order(work, self._view), work.id, work) for work in self._work.values()]
        return (entry[2] for entry in sorted(keyed, key=_without_work))

    def first(self, order: Order) -> W | None:
        """The first in an order, or None where the queue is empty."""
        if len(self._work) < 2:
            return next(iter(self._work.values()), None)
        index = self._indexed(order)
        return next(self.by(order)) if index is None else index.entries()[0][2]

    def _indexed(self, order: Order) -> _Index[W] | None:
        """The index of an order that has declared one; built at its first use."""
        index = self._index.get(order)
        if index is None and hasattr(order, "flips_s"):
            index = self._index[order] = _Index(order, self._view)
            for work in self._work.values():
                index.add(work)
        return index

    def add(self, work: W) -> None:
        self._work[work.id] = work
        for index in self._index.values():
            index.add(work)

    def remove(self, work: W) -> None:
        del self._work[work.id]
        for index in self._index.values():
            index.remove(work)


def _without_work(entry: tuple[Any, int, Any]) -> tuple[Any, int]:
    return entry[0], entry[1]


class _Index(Generic[W]):
    """A sorted cache for one order. Its answers depend on the queue's contents and the view's time only.

    Work is filed when somebody looks, so what comes and goes through an otherwise empty queue is never filed.
    """

    __slots__ = ("_entries", "_flips", "_keys", "_order", "_read_s", "_unfiled", "_view")

    def __init__(self, order: Order, view: Clock) -> None:
        self._order = order
        self._view = view
        self._entries: Any = SortedList()  # of (key, id, work); ids differ, so work is never compared
        self._keys: dict[int, Any] = {}
        self._unfiled: dict[int, W] = {}
        self._flips: list[tuple[float, int]] = []  # a heap; entries of work that left or flipped are skipped
        self._read_s = -math.inf

    def add(self, work: W) -> None:
        self._unfiled[work.id] = work

    def remove(self, work: W) -> None:
        if self._unfiled.pop(work.id, None) is None:
            self._entries.remove((self._keys.pop(work.id), work.id, work))

    def entries(self) -> Any:
        """The sorted list of (key, id, work), as of the view's time."""
        now_s = self._view.now_s
        if now_s < self._read_s:
            self._unfile()
        self._read_s = now_s
        flips = self._flips
        while flips and flips[0][0] <= now_s:
            self._flip(heapq.heappop(flips)[1])
        if self._unfiled:
            for work in self._unfiled.values():
                self._file(work)
            self._unfiled.clear()
        return self._entries

    def _file(self, work: W) -> None:
        key = self._order(work, self._view)
        self._keys[work.id] = key
        self._entries.add((key, work.id, work))
        flips_s = self._order.flips_s(work, self._view)  # type: ignore[attr-defined]
        if self._view.now_s < flips_s < math.inf:
            heapq.heappush(self._flips, (flips_s, work.id))

    def _flip(self, number: int) -> None:
        """Files work under its later key; work that left, or came back since, is filed right already."""
        if number in self._keys:
            position = self._entries.bisect_left((self._keys.pop(number), number))
            work = self._entries.pop(position)[2]
            self._file(work)

    def _unfile(self) -> None:
        """Forgets all keys, where a caller reads an earlier time than before."""
        self._unfiled |= {number: work for _, number, work in self._entries}
        self._entries.clear()
        self._keys.clear()
        self._flips.clear()
