"""The report `full`: every report of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowsim.metrics import Result
from flowsim.report.html import Html
from flowsim.report.plots import Plots
from flowsim.report.trace import Trace

__all__ = ["Full"]


class Full:
    """Writes what `plots`, `trace` and `html` write; `window_s` is the trace's and the page's."""

    def __init__(self, window_s: Sequence[float] | None = None) -> None:
        self.reports = (Plots(), Trace(window_s), Html(window_s))

    def write(self, result: Result, folder: Path, title: str) -> list[Path]:
        """Writes them all into a folder; returns their paths."""
        return [path for report in self.reports for path in report.write(result, folder, title)]
