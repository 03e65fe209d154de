"""Traces: requests from a file, in arrival order, the first at 0; what was read is reported by logging.

This module must not know how a file is written: `readers` answers rows, this sorts, checks and reports them.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from flowsim.core import Request
from flowsim.names import near_names
from flowsim.workload.arrivals import arrival_times
from flowsim.workload.define import workload
from flowsim.workload.readers import NO_ARRIVAL, READERS, TIME_UNITS, ReadRows, choose, open_trace
from flowsim.workload.rows import Rows
from flowsim.workload.trace_summary import Percentiles, TraceSummary, counted, some

__all__ = ["OnBadRow", "Synthesize", "TraceSummary", "load_trace", "read_trace", "trace"]

OnBadRow = Literal["error", "drop"]
Synthesize = Literal["poisson"]

DAY_S = 86400.0
OPTIONAL_COLUMNS = tuple(
    field.name for field in fields(Request) if field.name not in ("id", "arrival_s", "prompt_tokens")
)
"""What an ignored column of a table may have been meant to be: it has the others, or it could not be read."""

_log = logging.getLogger("flowsim")


@workload
def trace(
    *,
    path: str | Path,
    format: str = "auto",  # noqa: A002 -- the key that people write
    time_unit: str | None = None,
    on_bad_row: OnBadRow = "error",
    synthesize: Synthesize | None = None,
    seed: int = 0,
) -> Rows:
    """The requests of the trace at `path`; `read_trace` says what a trace is.

    `synthesize="poisson"` draws arrivals for a file that has none, one a second unless `rate_rps` scales them. Logs to
    `flowsim` what was read (info), and rows out of order or dropped (warning).

    Raises:
        ValueError: as `read_trace`.
    """
    rows, summary = read_trace(
        path,
        format=format,
        time_unit=time_unit,
        on_bad_row=on_bad_row,
        synthesize=synthesize,
        rate_rps=None if synthesize is None else 1.0,
        seed=seed,
    )
    _log.info("read %s", summary.describe())
    for warning in summary.warnings:
        _log.warning("%s: %s", summary.path, warning)
    return rows


def load_trace(path: str | Path, **options: Any) -> list[Request]:
    """`trace`, with the path as the first argument."""
    return trace(path=path, **options)


def read_trace(
    path: str | Path,
    *,
    format: str = "auto",  # noqa: A002
    time_unit: str | None = None,
    on_bad_row: OnBadRow = "error",
    synthesize: Synthesize | None = None,
    rate_rps: float | None = None,
    seed: int = 0,
) -> tuple[Rows, TraceSummary]:
    """The rows of a trace file, plain or gzip, sorted by arrival and the first at 0, and a summary of what was read.

    `format` is a name in `readers.READERS` or `auto`, by content; `docs/workloads.md` says what each reads. `time_unit`
    (s, ms, us, ns) overrides the format's own. Equal arrivals keep the file's order. Numbers are read exactly, so
    the `requests.csv` of a run replays it. `on_bad_row="drop"` leaves bad rows out and counts them.
    `synthesize="poisson"` draws all arrivals at `rate_rps` from `seed`, for a file in which some row has none.

    Raises:
        ValueError: an argument out of its range; the file cannot be read as a trace, or is of no known format; it has
            bad rows, which are named by line (from 1) or list index (from 0), and `on_bad_row` is "error"; no good
            row; arrivals that are missing, or not and yet to be drawn; arrivals that span too long for their unit.
    """
    _check_choice("on_bad_row", on_bad_row, get_args(OnBadRow))
    if time_unit is not None:
        _check_choice("time_unit", time_unit, TIME_UNITS)
    _check_synthesis(synthesize, rate_rps, seed)
    file = open_trace(Path(path).expanduser(), time_unit=time_unit, draws_arrivals=synthesize is not None)
    name = choose(file, format)
    read = READERS[name].read(file)
    _check_rows(path, read, on_bad_row)
    if rate_rps is not None:
        _draw_arrivals(path, read, rate_rps, seed)
    out_of_order = _sort_and_rebase(read)
    _check_span(path, read, READERS[name].max_span_s)
    read.rows.has_slos = read.has_slos
    return read.rows, _summary(path, name, read, out_of_order)


def _check_choice(name: str, given: object, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ValueError(f"{name} is {given!r}; it must be one of {', '.join(allowed)}")


def _check_synthesis(synthesize: str | None, rate_rps: float | None, seed: int) -> None:
    if synthesize is None:
        if rate_rps is not None:
            raise ValueError(f"rate_rps is {rate_rps} without synthesize=poisson; the file's own arrivals have a rate")
        return
    _check_choice("synthesize", synthesize, get_args(Synthesize))
    if rate_rps is None:
        raise ValueError("synthesize=poisson needs rate_rps, the requests per second to draw")
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed is {seed!r}; it must be an integer of at least 0")


def _check_rows(path: str | Path, read: ReadRows, on_bad_row: OnBadRow) -> None:
    bad_rows = tuple(map(str, read.bad_rows))
    without = sum(row.reason == NO_ARRIVAL for row in read.bad_rows)
    if without and without == len(read.rows) + len(bad_rows):
        raise ValueError(
            f"{path}: no row has an arrival ({bad_rows[0]}); "
            "draw them with synthesize=poisson and rate_rps, requests per second"
        )
    if bad_rows and on_bad_row == "error":
        drawn = ", or draw all arrivals with synthesize=poisson and rate_rps" if without else ""
        raise ValueError(
            f"{path}: {counted(len(bad_rows), 'bad row')}: {some(bad_rows)}. "
            f"Mend the file, or leave such rows out with on_bad_row=drop{drawn}"
        )
    if not len(read.rows):
        left_out = "; ".join(f"{count} {reason}" for reason, count in read.left_out.items())
        raise ValueError(f"{path}: no good row is left: {some(bad_rows) or left_out}")


def _draw_arrivals(path: str | Path, read: ReadRows, rate_rps: float, seed: int) -> None:
    """Poisson arrivals from the stream that synthetic workloads draw theirs from."""
    given = int(np.count_nonzero(~np.isnan(read.rows.arrival_s)))
    if given == len(read.rows):
        raise ValueError(f"{path}: every row has an arrival; leave synthesize=poisson out, it is for rows without")
    if given:
        read.warnings.append(f"{counted(given, 'arrival')} of the file replaced, for other rows have none")
    stream = np.random.SeedSequence(int(seed), spawn_key=(0,)).spawn(1)[0]
    read.rows.arrival_s = arrival_times("poisson", np.random.default_rng(stream), rate_rps, len(read.rows))


def _sort_and_rebase(read: ReadRows) -> int:
    """Sort by arrival, keeping the file's order among equals; shift to 0; answer the rows out of order."""
    arrival_s = read.rows.arrival_s
    out_of_order = int(np.count_nonzero(arrival_s < np.maximum.accumulate(arrival_s)))
    if out_of_order:
        read.rows = read.rows.take(np.argsort(arrival_s, kind="stable"))
    read.rows.arrival_s = read.rows.arrival_s - read.rows.arrival_s[0]
    return out_of_order


def _check_span(path: str | Path, read: ReadRows, max_span_s: float) -> None:
    span_s = float(read.rows.arrival_s[-1])
    if span_s > max_span_s:
        raise ValueError(
            f"{path}: arrivals span {span_s:.6g} s, which is {span_s / DAY_S:.6g} days; "
            f"at most {max_span_s / DAY_S:.6g} are allowed; is the unit wrong? "
            f"It was read as {read.time_unit}; time_unit= says otherwise"
        )


def _summary(path: str | Path, name: str, read: ReadRows, out_of_order: int) -> TraceSummary:
    rows, dropped = read.rows, tuple(map(str, read.bad_rows))
    span_s = float(rows.arrival_s[-1])
    warnings = list(read.warnings)
    if out_of_order:
        warnings.append(f"{counted(out_of_order, 'row')} out of order; sorted by arrival")
    if read.clamped_turns:
        warnings.append(f"{counted(read.clamped_turns, 'follow-up turn')} without a new block: the last block is taken")
    warnings += [f"left out {counted(count, 'row')}: {reason}" for reason, count in read.left_out.items()]
    for column in read.ignored:
        near = near_names(column, OPTIONAL_COLUMNS, cutoff=0.8)
        if near and name in ("csv", "jsonl"):
            warnings.append(f"the column {column!r} is ignored; {near.strip()}")
    if dropped:
        warnings.append(f"dropped {counted(len(dropped), 'bad row')}: {some(dropped)}")
    return TraceSummary(
        path=str(path),
        format=name,
        time_unit=read.time_unit,
        rows=len(rows),
        span_s=span_s,
        rate_rps=(len(rows) - 1) / span_s if span_s > 0.0 else None,
        prompt_tokens=Percentiles.of(rows.prompt_tokens),
        output_tokens=Percentiles.of(rows.output_tokens),
        has_slos=read.has_slos,
        block_tokens=read.block_tokens,
        dropped=dropped,
        dropped_by_reason=dict(Counter(row.reason for row in read.bad_rows)) | read.left_out,
        columns_ignored=read.ignored,
        rows_out_of_order=out_of_order,
        clamped_turns=read.clamped_turns,
        warnings=tuple(warnings),
    )
