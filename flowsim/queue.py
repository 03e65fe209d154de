"""Work in the order that a policy asks for. Knows orders only as functions; no policy by name, no clock.

An order is `order(work, view) -> key`, smallest key first; ties go to the lower id. Called on every piece of
work it costs O(n) a decision, which is fine for an experiment. An order whose keys stand still, or change
at known times, says so with `@indexed`, and the queue keeps a sorted index for it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any, Generic, Protocol, TypeVar

from sortedcontainers import SortedList

__all__ = ["JobQueue", "Order", "Ranked", "indexed"]


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
Ranked = tuple[Any, int, W]
"""A piece of work behind what it is sorted by: its key in an order, and its id."""
MOST_ASIDE = 16
_WORK: Callable[[Ranked[Any]], Any] = itemgetter(2)


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
    """Jobs that wait, or batches that are suspended; at most one piece of work for an id (`by_id`, only to be read)."""

    __slots__ = ("_index", "_view", "by_id")

    def __init__(self, view: Clock) -> None:
        self._view = view
        self.by_id: dict[int, W] = {}
        self._index: dict[Order, _Index[W]] = {}

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[W]:
        """In order of arrival."""
        return iter(sorted(self.by_id.values(), key=lambda work: work.id))

    def __contains__(self, work: object) -> bool:
        return self.by_id.get(getattr(work, "id", -1)) is work

    def by(self, order: Order) -> Iterator[W]:
        """The work in an order, as of the view's `now_s`; not to be changed while it is walked."""
        if len(self.by_id) < 2:
            return iter(self.by_id.values())
        index = self._indexed(order)
        ranked = sorted(self._ranked(order)) if index is None else index.ranked()
        return map(_WORK, ranked)

    def first(self, order: Order) -> W | None:
        """The first in an order, or None where the queue is empty."""
        for work in self.by_id.values():
            return work if len(self.by_id) == 1 else self.front(order)[2]  # type: ignore[index]
        return None

    def front(self, order: Order) -> Ranked[W] | None:
        """The first in an order with its rank: (key, id, work); None where the queue is empty."""
        for work in self.by_id.values():
            if len(self.by_id) == 1:
                return order(work, self._view), work.id, work
            index = self._index.get(order) or self._indexed(order)
            return min(self._ranked(order)) if index is None else index.front()
        return None

    def _ranked(self, order: Order) -> Iterator[Ranked[W]]:
        """All work with its rank, in no order."""
        view = self._view
        return ((order(work, view), work.id, work) for work in self.by_id.values())

    def _indexed(self, order: Order) -> _Index[W] | None:
        """The index of an order that has declared one; built at its first use."""
        index = self._index.get(order)
        if index is None and hasattr(order, "flips_s"):
            index = self._index[order] = _Index(order, self._view)
            index.unfiled.update(self.by_id)
        return index

    def add(self, work: W) -> None:
        number = work.id
        self.by_id[number] = work
        for index in self._index.values():
            index.unfiled[number] = work

    def remove(self, work: W) -> None:
        number = work.id
        del self.by_id[number]
        for index in self._index.values():
            index.remove(number)


class _Index(Generic[W]):
    """A sorted cache for one order. Its answers depend on the queue's contents and the view's time only.

    Work gets its key when somebody looks, so what comes and goes through an otherwise empty queue never has one. The
    latest few are kept aside unsorted: of a short queue it is cheaper to look at all than to keep it sorted.
    """

    __slots__ = (
        "_aside", "_due_s", "_filed_s", "_first", "_flips", "_flips_s", "_order", "_sorted", "_sorted_by_id", "_view",
        "unfiled",
    )  # fmt: skip

    def __init__(self, order: Order, view: Clock) -> None:
        self._order = order
        self._flips_s: Callable[[W, Clock], float] = order.flips_s  # type: ignore[attr-defined]
        self._view = view
        self.unfiled: dict[int, W] = {}  # work without a key
        self._aside: dict[int, Ranked[W]] = {}
        self._sorted: Any = SortedList()  # of Ranked; ids differ, so work is never compared
        self._first: Ranked[W] | None = None  # of the sorted, once somebody has looked
        self._sorted_by_id: dict[int, Ranked[W]] = {}
        self._flips: list[tuple[float, int]] = []  # a heap; entries of work that left or flipped are skipped
        self._filed_s = self._due_s = -math.inf  # keys are those of any time from the one up to the other

    def remove(self, number: int) -> None:
        """Takes work out."""
        if self.unfiled.pop(number, None) is None and self._aside.pop(number, None) is None:
            self._sorted.remove(self._sorted_by_id.pop(number))
            self._first = None

    def front(self) -> Ranked[W]:
        """The first of all, as of the view's time."""
        if self.unfiled or not self._filed_s <= self._view.now_s < self._due_s:
            self._file()
        if not self._sorted_by_id:
            return min(self._aside.values())
        first = self._first
        if first is None:
            first = self._first = self._sorted[0]
        return min(first, *self._aside.values()) if self._aside else first

    def ranked(self) -> Iterable[Ranked[W]]:
        """All in order, as of the view's time."""
        self._file()
        if not self._sorted_by_id:
            return sorted(self._aside.values())
        self._sort()
        return self._sorted  # type: ignore[no-any-return]

    def _file(self) -> None:
        """Brings the keys up to the view's time."""
        now_s, flips = self._view.now_s, self._flips
        if now_s < self._filed_s:
            self._unfile()
        while flips and flips[0][0] <= now_s:
            self._flip(heapq.heappop(flips)[1])
        if self.unfiled:
            for work in self.unfiled.values():
                self._rank(work)
            self.unfiled.clear()
            if len(self._aside) > MOST_ASIDE:
                self._sort()
        self._filed_s, self._due_s = now_s, flips[0][0] if flips else math.inf

    def _rank(self, work: W) -> None:
        view = self._view
        self._aside[work.id] = (self._order(work, view), work.id, work)
        flips_s = self._flips_s(work, view)
        if view.now_s < flips_s < math.inf:
            heapq.heappush(self._flips, (flips_s, work.id))

    def _sort(self) -> None:
        """Files what is aside."""
        self._sorted.update(self._aside.values())
        self._first = None
        self._sorted_by_id |= self._aside
        self._aside.clear()

    def _flip(self, number: int) -> None:
        """Gives work its later key; work that left, or came back since, has the right one already."""
        ranked = self._aside.get(number) or self._sorted_by_id.get(number)
        if ranked is not None:
            self.remove(number)
            self._rank(ranked[2])

    def _unfile(self) -> None:
        """Forgets all keys, where a caller reads an earlier time than before."""
        for ranked in (*self._aside.values(), *self._sorted):
            self.unfiled[ranked[1]] = ranked[2]
        self._aside.clear()
        self._sorted.clear()
        self._first = None
        self._sorted_by_id.clear()
        self._flips.clear()
