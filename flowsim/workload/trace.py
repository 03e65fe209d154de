"""Traces: requests from a file, in arrival order, the first at 0; what was read is reported by logging.

This module must not know how a file is written: `plain_csv` reads columns, this makes requests of them.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from dataclasses import dataclass, fields, replace
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from flowsim.core import Request
from flowsim.workload.plain_csv import Columns, read_plain_csv
from flowsim.workload.slo import check_scale

__all__ = ["OnBadRow", "TraceSummary", "load_trace", "read_trace", "trace"]

OnBadRow = Literal["error", "drop"]

MAX_SPAN_S = 30 * 86400.0
SHOWN_ROWS = 5

_log = logging.getLogger("flowsim")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """What was read from a trace.

    `rows` requests were kept; `dropped` has one sentence for each row that was not, naming its line. A row is
    out of order if an earlier row arrives later. `rate_rps` is `(rows - 1) / span_s`, None for a span of 0.
    """

    path: str
    rows: int
    dropped: tuple[str, ...]
    columns_ignored: tuple[str, ...]
    rows_out_of_order: int
    span_s: float
    rate_rps: float | None


def trace(
    *, path: str | Path, slo_scale: float = 1.0, on_bad_row: OnBadRow = "error", abandon_s: float | None = None
) -> list[Request]:
    """The requests of the trace at `path`, their SLOs times `slo_scale`; `read_trace` says what a trace is.

    `abandon_s` replaces what the file says of when clients give up. Logs to `flowsim` what was read (info), and
    rows out of order or dropped (warning).

    Raises:
        ValueError: as `read_trace`; or `slo_scale` is not a finite number above 0, or `abandon_s` not above 0.
    """
    requests, summary = read_trace(path, on_bad_row, slo_scale=slo_scale)
    _report(summary)
    return requests if abandon_s is None else [replace(request, abandon_s=abandon_s) for request in requests]


def load_trace(path: str | Path, **options: Any) -> list[Request]:
    """`trace`, with the path as the first argument."""
    return trace(path=path, **options)


def read_trace(
    path: str | Path, on_bad_row: OnBadRow = "error", *, slo_scale: float = 1.0
) -> tuple[list[Request], TraceSummary]:
    """The requests of a plain CSV file, also as `.gz`, and a summary of what was read.

    Columns: `arrival_s` (seconds, finite, >= 0) and `prompt_tokens`; where they are there also
    `output_tokens` (else 1), `slo_class` (empty: `default`; blanks around it are cut), `ttft_slo_s` and
    `tbt_slo_s` (seconds > 0; empty or `inf`: none), and `abandon_s` (seconds after arrival at which the client
    of a request that has not started gives up; empty or `inf`: never). Others are ignored and listed. Arrivals
    are shifted so that the first is at 0 and sorted; equal ones keep the file's order, and `id` is the row after
    the sort.
    Floats are read exactly, so the `requests.csv` of a run replays it. `on_bad_row="drop"` leaves bad rows
    out and counts them.

    Raises:
        ValueError: the file cannot be read as a trace; it has bad rows, which are named by line (the header
            is line 1), and `on_bad_row` is "error"; no good row; arrivals that span more than 30 days.
    """
    check_scale(slo_scale)
    if on_bad_row not in get_args(OnBadRow):
        raise ValueError(f"on_bad_row is {on_bad_row!r}; it must be one of {', '.join(get_args(OnBadRow))}")
    columns = read_plain_csv(Path(path).expanduser())
    _check_rows(path, columns, on_bad_row)
    out_of_order = _sort_and_rebase(columns)
    span_s = float(columns.arrival_s[-1])
    if span_s > MAX_SPAN_S:
        raise ValueError(
            f"{path}: arrivals span {span_s:.6g} s, which is {span_s / 86400:.6g} days; "
            "at most 30 are allowed; is the unit wrong? arrival_s is in seconds"
        )
    rows = len(columns.arrival_s)
    summary = TraceSummary(
        path=str(path),
        rows=rows,
        dropped=tuple(columns.bad_rows),
        columns_ignored=columns.ignored,
        rows_out_of_order=out_of_order,
        span_s=span_s,
        rate_rps=(rows - 1) / span_s if span_s > 0.0 else None,
    )
    return _requests(columns, slo_scale), summary


def _check_rows(path: str | Path, columns: Columns, on_bad_row: OnBadRow) -> None:
    if columns.bad_rows and on_bad_row == "error":
        raise ValueError(
            f"{path}: {_counted(len(columns.bad_rows), 'bad row')}: {_some(columns.bad_rows)}. "
            "Mend the file, or leave such rows out with on_bad_row=drop"
        )
    if not len(columns.arrival_s):
        raise ValueError(f"{path}: no good row is left: {_some(columns.bad_rows)}")


def _sort_and_rebase(columns: Columns) -> int:
    """Sort by arrival, keeping the file's order among equals; shift to 0; answer the rows out of order."""
    arrival_s = columns.arrival_s
    out_of_order = int(np.count_nonzero(arrival_s < np.maximum.accumulate(arrival_s)))
    if out_of_order:
        order = np.argsort(arrival_s, kind="stable")
        for name in ("arrival_s", "prompt_tokens", "output_tokens", "ttft_slo_s", "tbt_slo_s", "abandon_s"):
            setattr(columns, name, getattr(columns, name)[order])
        columns.slo_class = [columns.slo_class[row] for row in order.tolist()]
    columns.arrival_s = columns.arrival_s - columns.arrival_s[0]
    return out_of_order


def _requests(columns: Columns, slo_scale: float) -> list[Request]:
    """Requests of sorted columns.

    The columns are checked, so a request's own checks are not run again: slots are filled a column at a time,
    a fifth of the constructor's time for a million rows.
    """
    rows = len(columns.arrival_s)
    values: dict[str, Any] = {
        "id": range(rows),
        "arrival_s": columns.arrival_s.tolist(),
        "prompt_tokens": columns.prompt_tokens.tolist(),
        "output_tokens": columns.output_tokens.tolist(),
        "ttft_slo_s": (columns.ttft_slo_s * slo_scale).tolist(),
        "tbt_slo_s": (columns.tbt_slo_s * slo_scale).tolist(),
        "slo_class": columns.slo_class,
        "prefix_hashes": repeat(()),
        "abandon_s": columns.abandon_s.tolist(),
    }
    requests = _blank_requests(rows)
    for field in fields(Request):
        slot = getattr(Request, field.name)
        deque(map(slot.__set__, requests, values[field.name]), maxlen=0)
    return requests


def _blank_requests(rows: int) -> list[Request]:
    """Requests without values; the collector, which would walk them all time and again, rests meanwhile."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return list(map(object.__new__, repeat(Request, rows)))
    finally:
        if collects:
            gc.enable()


def _report(summary: TraceSummary) -> None:
    rate = "all at once" if summary.rate_rps is None else f"{summary.rate_rps:.4g} requests/s"
    ignored = ", ".join(summary.columns_ignored) or "none"
    _log.info(
        "read %s: %s over %.6g s, %s; columns ignored: %s",
        summary.path,
        _counted(summary.rows, "request"),
        summary.span_s,
        rate,
        ignored,
    )
    if summary.rows_out_of_order:
        out_of_order = _counted(summary.rows_out_of_order, "row")
        _log.warning("%s: %s out of order; sorted by arrival", summary.path, out_of_order)
    if summary.dropped:
        dropped = _counted(len(summary.dropped), "bad row")
        _log.warning("%s: dropped %s: %s", summary.path, dropped, _some(list(summary.dropped)))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _some(rows: list[str]) -> str:
    more = f"; and {len(rows) - SHOWN_ROWS} more" if len(rows) > SHOWN_ROWS else ""
    return "; ".join(rows[:SHOWN_ROWS]) + more
