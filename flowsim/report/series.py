"""A run over time: intervals and step functions taken from its tables, and their means and peaks in bins.

Arrays in, arrays out; nothing here is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flowsim.core import Outcome, Reason
from flowsim.log import Columns, Ended

__all__ = [
    "Intervals",
    "Steps",
    "busy",
    "counted",
    "heads",
    "last_s",
    "means",
    "members",
    "peaks",
    "shares",
    "suspended",
    "waiting",
]

Array = npt.NDArray[Any]


class Intervals(NamedTuple):
    """Stretches of time, each of a request (or a batch's head) at an instance."""

    start_s: Array
    end_s: Array
    request: Array
    instance: Array

    def at(self, instance: int) -> Intervals:
        """Those of one instance."""
        rows = self.instance == instance
        return Intervals(*(column[rows] for column in self))


class Steps(NamedTuple):
    """A value that changes at `t_s` (ascending) and holds until the next; before the first it is 0."""

    t_s: Array
    values: Array


def waiting(tables: Mapping[str, Columns]) -> Intervals:
    """When each request was in a queue before its first token: from its arrival, and between two chunks, until a batch
    took it.

    One that was refused on arrival never was; one that gave up or never started was until then.
    """
    requests, parts = tables["requests"], tables["batches"]
    begin_s, end_s = _batch_ends(tables)
    order = np.lexsort((parts["batch"], parts["request"]))
    request, batch, instance = (parts[name][order] for name in ("request", "batch", "instance"))
    later = np.append(False, request[1:] == request[:-1]) if len(request) else np.zeros(0, dtype=bool)
    since_s = np.where(later, end_s[np.roll(batch, 1)], requests["arrival_s"][request])
    first = ~(begin_s[batch] >= requests["first_token_s"][request])  # not what is computed again, after an eviction
    since_s, request, batch, instance = since_s[first], request[first], batch[first], instance[first]
    queued = (requests["outcome"] == Outcome.UNFINISHED.value) | (requests["reason"] == Reason.ABANDONED.value)
    never = np.flatnonzero(np.isnan(requests["start_s"]) & queued)
    gone_s = np.minimum(requests["arrival_s"][never] + requests["abandon_s"][never], last_s(tables))
    where = [-1 if one is None else one for one in requests["prefill_instance"][never].tolist()]
    found = Intervals(
        np.concatenate([since_s, requests["arrival_s"][never]]),
        np.concatenate([begin_s[batch], gone_s]),
        np.concatenate([request, never]),
        np.concatenate([instance, np.array(where, dtype=np.int64)]),
    )
    if "migrations" not in tables:
        return found
    return _where_it_was(found, tables["migrations"], requests["arrival_s"], came_s(tables))


def came_s(tables: Mapping[str, Columns]) -> Array:
    """When each request came to the queue that it started from: its arrival, or its last move."""
    came_s: Array = tables["requests"]["arrival_s"].copy()
    if "migrations" in tables:
        np.maximum.at(came_s, tables["migrations"]["request"], tables["migrations"]["at_s"])
    return came_s


def _where_it_was(found: Intervals, moves: Columns, arrival_s: Array, came_s: Array) -> Intervals:
    """Waits with those of requests that moved cut at each move."""
    order = np.lexsort((moves["at_s"], moves["request"]))
    request, source, at_s = (moves[name][order] for name in ("request", "source", "at_s"))
    first = np.append(True, request[1:] != request[:-1])
    from_s = np.where(first, arrival_s[request], np.roll(at_s, 1))
    on_arrival = found.start_s == arrival_s[found.request]
    return Intervals(
        np.concatenate([np.where(on_arrival, came_s[found.request], found.start_s), from_s]),
        np.concatenate([found.end_s, at_s]),
        np.concatenate([found.request, request]),
        np.concatenate([found.instance, source]),
    )


def suspended(tables: Mapping[str, Columns]) -> Intervals:
    """When each batch was suspended; `request` is its head."""
    segments = tables["segments"]
    order = np.lexsort((segments["start_s"], segments["batch"]))
    paused = segments["ended"][order] == Ended.PAUSED.value
    until_s = np.append(segments["start_s"][order][1:], np.nan)
    same = np.append(segments["batch"][order][1:] == segments["batch"][order][:-1], False)
    until_s = np.where(same, until_s, last_s(tables))
    rows = order[paused]
    return Intervals(
        segments["end_s"][rows], until_s[paused], heads(tables)[segments["batch"][rows]], segments["instance"][rows]
    )


def busy(tables: Mapping[str, Columns]) -> Intervals:
    """When each instance's GPUs were busy: its segments, with switches and barriers; `request` is the head."""
    segments = tables["segments"]
    return Intervals(
        segments["start_s"] - segments["switch_s"],
        segments["end_s"] + segments["barrier_s"],
        heads(tables)[segments["batch"]],
        segments["instance"],
    )


def heads(tables: Mapping[str, Columns]) -> Array:
    """The request at the head of each batch, by the batch's number; -1 for numbers that no batch has."""
    parts = tables["batches"]
    found = np.full(_numbers(tables), -1)
    first = parts["position"] == 0
    found[parts["batch"][first]] = parts["request"][first]
    return found


def members(tables: Mapping[str, Columns]) -> Array:
    """How many requests each batch has, by its number."""
    return np.bincount(tables["batches"]["batch"], minlength=_numbers(tables))


def counted(intervals: Intervals) -> Steps:
    """How many of the intervals hold at a time."""
    times_s = np.concatenate([intervals.start_s, intervals.end_s])
    change = np.repeat([1, -1], len(intervals.start_s))
    order = np.lexsort((change, times_s))
    t_s, total = times_s[order], np.cumsum(change[order])
    last = np.append(t_s[1:] != t_s[:-1], True) if len(t_s) else np.zeros(0, dtype=bool)
    return Steps(t_s[last], total[last])


def shares(intervals: Intervals, edges_s: Array) -> Array:
    """The mean number of intervals that hold, in each bin."""
    covered_s = _covered(intervals.start_s, edges_s) - _covered(intervals.end_s, edges_s)
    share: Array = np.diff(covered_s) / np.diff(edges_s)
    return share


def peaks(steps: Steps, edges_s: Array) -> Array:
    """The largest value in each bin, the one that a bin begins with included."""
    before = np.searchsorted(steps.t_s, edges_s[:-1], side="right") - 1
    at_start = np.where(before >= 0, steps.values[before] if len(steps.values) else 0, 0)
    high: Array = np.full(len(edges_s) - 1, -np.inf)
    place = np.searchsorted(edges_s, steps.t_s, side="right") - 1
    inside = (place >= 0) & (place < len(high))
    np.maximum.at(high, place[inside], steps.values[inside])
    np.maximum(high, at_start, out=high)
    return high


def means(steps: Steps, edges_s: Array) -> Array:
    """The mean over time in each bin."""
    if not len(steps.t_s):
        return np.zeros(len(edges_s) - 1)
    held = np.append(0.0, np.cumsum(np.diff(steps.t_s) * steps.values[:-1]))
    place = np.searchsorted(steps.t_s, edges_s, side="right") - 1
    inside = np.maximum(place, 0)
    up_to = np.where(place >= 0, held[inside] + (edges_s - steps.t_s[inside]) * steps.values[inside], 0.0)
    mean: Array = np.diff(up_to) / np.diff(edges_s)
    return mean


def last_s(tables: Mapping[str, Columns]) -> float:
    """The latest time that any table names: the end of the run, as far as it can be seen."""
    requests, segments = tables["requests"], tables["segments"]
    columns_s = (requests["arrival_s"], requests["finish_s"], segments["end_s"], tables["kv"]["t_s"])
    return float(max((np.nanmax(column) for column in columns_s if not np.isnan(column).all()), default=0.0))


def _numbers(tables: Mapping[str, Columns]) -> int:
    """One more than the largest number of a batch."""
    columns = (tables["batches"]["batch"], tables["segments"]["batch"])
    return int(max((column.max() for column in columns if len(column)), default=-1)) + 1


def _batch_ends(tables: Mapping[str, Columns]) -> tuple[Array, Array]:
    """When each batch began its first segment and ended its last; the end of the run without one."""
    segments, over_s = tables["segments"], last_s(tables)
    begin_s, end_s = np.full(_numbers(tables), over_s), np.full(_numbers(tables), -np.inf)
    np.minimum.at(begin_s, segments["batch"], segments["start_s"])
    np.maximum.at(end_s, segments["batch"], segments["end_s"])
    return begin_s, np.where(np.isinf(end_s), over_s, end_s)


def _covered(from_s: Array, edges_s: Array) -> Array:
    """The seconds up to each edge that lie after each of the times, added up."""
    ordered_s = np.sort(from_s)
    before = np.searchsorted(ordered_s, edges_s, side="right")
    total_s = np.append(0.0, np.cumsum(ordered_s))
    covered_s: Array = before * edges_s - total_s[before]
    return covered_s
