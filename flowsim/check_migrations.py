"""What must hold of requests that moved from one queue to another; `docs/invariants.md` numbers the laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flowsim.law import SAME_S, hold
from flowsim.metrics import Result

__all__ = ["came_s", "check_migrations"]

Array = npt.NDArray[Any]


def came_s(result: Result) -> Array:
    """When each request came to the instance that it started or ended on: its arrival, or its last move."""
    times_s: Array = result.tables["requests"]["arrival_s"].copy()
    if "migrations" in result.tables:
        moves = result.tables["migrations"]
        np.maximum.at(times_s, moves["request"], moves["at_s"])
    return times_s


def check_migrations(result: Result) -> None:
    """A request moves between its arrival and its start, within a pool, from where it last came to, and starts on the
    instance to which it moved last.

    Raises:
        AssertionError: the law broken, with both sides.
    """
    requests, table = result.tables["requests"], result.tables["migrations"]
    order = np.lexsort((np.arange(len(table["at_s"])), table["request"]))
    request, source, target, at_s = (table[name][order] for name in ("request", "source", "target", "at_s"))
    counted, moved = requests["migrations"], np.bincount(request, minlength=len(requests["id"]))
    hold("27 each move is counted", counted == moved, counted, moved)
    arrival_s, start_s = requests["arrival_s"][request], requests["start_s"][request]
    hold("27 a request moves once it is there", at_s >= arrival_s - SAME_S, at_s, arrival_s)
    hold("27 what has started does not move", ~(at_s > start_s + SAME_S), at_s, start_s)
    hold("27 to move is to go elsewhere", source != target, source, target)
    pool = np.zeros(result.run["instances"], dtype=np.int64)
    for place, one in enumerate(result.run["pools"].values()):
        pool[one["instances"][0] : one["instances"][1] + 1] = place
    hold("27 requests move within a pool", pool[source] == pool[target], source, target)
    if "requeued" in requests:
        return  # a failure moved some of them, too
    last = np.append(request[1:] != request[:-1], True)
    on = np.where(last, requests["prefill_instance"][request].astype(np.int64), np.append(source[1:], -1))
    hold("27 a request leaves from where it came to", target == on, target, on)
