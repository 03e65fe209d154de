"""What the page's timeline draws from: requests, segments, batches and flags as packed columns.

The page cuts windows out of them, so that zooming needs nothing but the file.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flowsim.log import Columns, Ended
from flowsim.metrics import Result
from flowsim.report.blocked import worst_blocked
from flowsim.report.series import last_s, members, waiting
from flowsim.report.story import worst

__all__ = ["timeline"]

Array = npt.NDArray[Any]

MOST_SEGMENTS = 200_000  # in one page: some 15 MB
SHOWN_S = 10.0  # at most, of the window that is drawn first


def timeline(result: Result, classes: Sequence[str], window_s: tuple[float, float] | None = None) -> dict[str, Any]:
    """One run's timeline for the page.

    Args:
        result: the run.
        classes: the names that `class` numbers stand for.
        window_s: what is drawn first; `worst_wait` unless given.
    """
    tables = result.tables
    requests, segments, flags = tables["requests"], tables["segments"], tables["preemptions"]
    end_s = last_s(tables)
    shown_s = window_s or worst_wait(result, end_s)
    rows, span_s = _embedded(segments["start_s"], segments["end_s"], shown_s, end_s)
    order = np.lexsort((tables["batches"]["position"], tables["batches"]["batch"]))
    places = {name: place for place, name in enumerate(classes)}
    until_s = np.where(np.isnan(requests["finish_s"]), requests["arrival_s"], requests["finish_s"])
    queue = waiting(tables)
    np.maximum.at(until_s, queue.request, queue.end_s)
    np.maximum.at(
        until_s,
        tables["batches"]["request"],
        np.where(np.isnan(requests["finish_s"]), end_s, -np.inf)[tables["batches"]["request"]],
    )
    ended = [one.value for one in Ended]
    near = (flags["stopped_s"] >= span_s[0]) & (flags["flagged_s"] <= span_s[1])
    return {
        "focus": _focus(result),
        "window_s": list(shown_s),
        "span_s": list(span_s),
        "end_s": end_s,
        "instances": result.run["instances"],
        "request_s": result.run.get("request_s", 0.0),
        "requests": {
            "arrival_s": packed(requests["arrival_s"], "f8"),
            "first_token_s": packed(requests["first_token_s"], "f8"),
            "until_s": packed(until_s, "f8"),
            "tokens": packed(requests["prompt_tokens"], "i4"),
            "slo_s": packed(requests["ttft_slo_s"], "f4"),
            **_decoded(requests),
            "class": packed(np.array([places[name] for name in requests["slo_class"].tolist()]), "u1"),
        },
        "segments": {
            "start_s": packed(segments["start_s"][rows], "f8"),
            "end_s": packed(segments["end_s"][rows], "f8"),
            **{name: packed(segments[name][rows], "i4") for name in ("batch", "instance", "first_op", "last_op")},
            "ended": packed(np.array([ended.index(name) for name in segments["ended"][rows].tolist()]), "u1"),
        },
        "ended": ended,
        "first_member": packed(np.append(0, np.cumsum(members(tables))), "i4"),
        "members": packed(tables["batches"]["request"][order], "i4"),
        "flags": {
            **{name: packed(flags[name][near], "f8") for name in ("flagged_s", "stopped_s")},
            **{name: packed(flags[name][near], "i4") for name in ("instance", "batch", "victim", "by")},
        },
    }


def _decoded(requests: Columns) -> dict[str, dict[str, str]]:
    """When each request had its last token, where any has more than one."""
    later = requests["finish_s"] > requests["first_token_s"]
    return {"decoded_s": packed(requests["finish_s"], "f8")} if later.any() else {}


def worst_wait(result: Result, end_s: float) -> tuple[float, float]:
    """The wait of the request at the worst head-of-line blocking; its last seconds if it is long."""
    requests = result.tables["requests"]
    row = _focus(result)
    if row is None:
        return 0.0, max(min(end_s, SHOWN_S), 1e-3)
    arrival_s, first_token_s = float(requests["arrival_s"][row]), float(requests["first_token_s"][row])
    length_s = min(first_token_s - arrival_s, SHOWN_S / 1.4)
    return max(0.0, first_token_s - 1.2 * length_s), first_token_s + 0.2 * length_s


def _focus(result: Result) -> int | None:
    """The request at the worst head-of-line blocking, or else the one that fared worst."""
    blocked = worst_blocked(result)
    if blocked is not None and not np.isnan(result.tables["requests"]["ttft_s"][blocked.request]):
        return blocked.request
    return next((request for request, _ in worst(result.tables["requests"], 1)), None)


def packed(column: Array, kind: str) -> dict[str, str]:
    """A column's bytes, little-endian, as base64 text under the name of their type."""
    cells = np.ascontiguousarray(column, dtype=np.dtype(kind))
    if sys.byteorder == "big":
        cells = cells.byteswap()
    return {kind: base64.b64encode(cells.tobytes()).decode("ascii")}


def _embedded(
    start_s: Array, stop_s: Array, shown_s: tuple[float, float], end_s: float
) -> tuple[Array, tuple[float, float]]:
    """The rows of the segments that go into the page, in order of time, and the time that they span: all, or as many
    as fit around the window that is drawn first."""
    order = np.argsort(start_s, kind="stable")
    if len(order) <= MOST_SEGMENTS:
        return order, (0.0, end_s)
    first = int(np.searchsorted(start_s[order], shown_s[0])) - MOST_SEGMENTS // 2
    first = min(max(first, 0), len(order) - MOST_SEGMENTS)
    rows = order[first : first + MOST_SEGMENTS]
    return rows, (float(start_s[rows[0]]), float(stop_s[rows[-1]]))
