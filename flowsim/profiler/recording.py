"""The growing trace of a collection: a row appended as it is measured, found again after an interruption.

Knows the operator trace's columns and this file; knows no device.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from flowsim.profiler.grid import Point
from flowsim.profiler.trace import COLUMNS, OPTIONAL, validate

__all__ = ["Recording"]

SPREAD = ("p10_s", "p90_s")
"""Columns beyond the operator trace's: percentiles over the repetitions. Readers of the trace leave them out."""
FIELDS = (*COLUMNS, *OPTIONAL, *SPREAD)
IDENTITY = ("model", "gpu", "tp", "software", "source")


class Recording:
    """One CSV file of one model, GPU, TP degree and software.

    Args:
        path: the file; made where it is not there.
        identity: the values of `IDENTITY` that every row has.
        say: takes a sentence for the user.

    Raises:
        ValueError: not a .csv file, not a trace, or the trace of another identity (names what differs).
    """

    def __init__(self, path: Path, identity: Mapping[str, str | int], say: Callable[[str], None]) -> None:
        if path.suffix != ".csv":
            raise ValueError(f"{path}: collect appends row by row, so --out must be a .csv file")
        self.path = path
        self._identity = dict(identity)
        self.done: set[Point] = set()
        text = self._complete(say)
        if text:
            self._resume(text, say)

    def append(self, point: Point, values: Mapping[str, float | int]) -> None:
        """Adds one row and waits until it is on disk."""
        row = self._identity | point.columns() | {"statistic": "median"} | dict(values)
        values_of_row: list[object] = [row.get(name, 0) for name in FIELDS]
        self._write([values_of_row] if self._has_rows() else [list(FIELDS), values_of_row])
        self.done.add(point)

    def _complete(self, say: Callable[[str], None]) -> str:
        """The file's text up to its last whole line; what follows was cut off, and is removed."""
        if not self.path.exists():
            return ""
        raw = self.path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):
            say(f"{self.path}: the last line was cut off; dropped, to be measured again")
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        return whole.decode("utf-8")

    def _resume(self, text: str, say: Callable[[str], None]) -> None:
        frame = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)
        if tuple(frame.columns) != FIELDS:
            raise ValueError(f"{self.path}: not a trace that collect wrote; give --out another file")
        if frame.empty:
            return
        trace = validate(frame, str(self.path))
        for name in IDENTITY:
            other = sorted({str(value) for value in trace[name]} - {str(self._identity[name])})
            if other:
                raise ValueError(
                    f"{self.path}: holds {name} {other[0]!r}, this run is {self._identity[name]!r}; "
                    "give --out another file, one per model, GPU, TP degree and software"
                )
        self.done = {Point.of(row) for row in trace.to_dict("records")}
        say(f"{self.path}: {len(self.done)} points are there already; going on")

    def _has_rows(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > 0

    def _write(self, rows: list[list[object]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
            file.flush()
            os.fsync(file.fileno())
