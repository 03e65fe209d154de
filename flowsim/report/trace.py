"""The report `trace`: a run as a timeline for Perfetto and chrome://tracing."""

from __future__ import annotations

import gzip
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flowsim.metrics import Result
from flowsim.report.series import last_s
from flowsim.report.trace_events import Scene

__all__ = ["Trace", "checked_window"]

MOST_POINTS = 1_200_000  # rows of tables in one trace; about 45 MB gzipped
LOG = logging.getLogger("flowsim")


class Trace:
    """Writes `trace.json.gz`: Chrome trace events of the whole run, or of a window of it.

    A process for each instance, with tracks for its GPU's segments, for preemption (from signal to acknowledgement),
    arrivals and first tokens (with arrows from one to the other), queue and suspension, and counters. A run of more
    than two million table rows is cut off there, with a message.
    """

    def __init__(self, window_s: Sequence[float] | None = None) -> None:
        self.window_s = checked_window(window_s)

    def write(self, result: Result, folder: Path, title: str) -> list[Path]:
        """Writes the file; returns its path."""
        end_s = last_s(result.tables)
        from_s, to_s = self.window_s or (0.0, end_s)
        fits_s = _fits_until(result, from_s, to_s)
        if fits_s < to_s:
            LOG.info(
                f"trace.json.gz ends at {fits_s:.1f} s of {end_s:.1f} s, to stay a size that viewers open; "
                f"another part: report.window_s=[{fits_s:.0f},{min(end_s, 2 * fits_s - from_s):.0f}]"
            )
        scene = Scene(result.tables, result.run, from_s, min(fits_s, to_s))
        path = folder / "trace.json.gz"
        about = {"title": title, "from_s": scene.from_s, "to_s": scene.to_s, **result.run}
        with path.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
            file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n'.encode())
            between = ""
            for event in scene.events():
                file.write(f"{between}{event}".encode())
                between = ",\n"
            file.write(b"\n]}\n")
        return [path]


def checked_window(window_s: Sequence[float] | None) -> tuple[float, float] | None:
    """The two ends of a window; None for the whole run.

    Raises:
        ValueError: not two finite numbers of seconds in ascending order, from 0 on.
    """
    if window_s is None:
        return None
    numbers = isinstance(window_s, Sequence) and not isinstance(window_s, str)
    if not numbers or len(window_s) != 2 or not all(isinstance(end_s, int | float) for end_s in window_s):
        raise ValueError(f"report.window_s is {window_s!r}; it must be two seconds, as in report.window_s=[10,20]")
    from_s, to_s = map(float, window_s)
    if not 0.0 <= from_s < to_s < math.inf:
        raise ValueError(f"report.window_s is [{from_s:g},{to_s:g}]; it must begin at 0 s or later, and end after that")
    return from_s, to_s


def _fits_until(result: Result, from_s: float, to_s: float) -> float:
    """When the rows from a time on become too many for one trace; `to_s` if they do not."""
    tables = result.tables
    columns = [
        tables["requests"]["arrival_s"],
        tables["segments"]["end_s"],
        tables["preemptions"]["stopped_s"],
        tables["kv"]["t_s"],
    ]
    times_s = np.sort(np.concatenate([column[(column >= from_s) & (column <= to_s)] for column in columns]))
    return float(times_s[MOST_POINTS]) if len(times_s) > MOST_POINTS else to_s
