"""Every figure of flowsim: one function for each kind, from a Result or a tidy table to a matplotlib Figure.

They are drawn in one style (`flowsim.report.style`), readable in colour and in grey; `save` writes them as png, pdf or
svg. The command, the experiments and the notebooks use the same. matplotlib is imported only when one is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from flowsim.core import Request
from flowsim.metrics import Result
from flowsim.names import unknown
from flowsim.report.bars import blocking, differences, goodput, matrix
from flowsim.report.curves import attainment, parameter, slo_scale
from flowsim.report.gantt import timeline, worst_blocking
from flowsim.report.runs import tbt_cdf, ttft_cdf, workload_figure
from flowsim.report.style import COLOURS, COLUMN_IN, FORMATS, PAGE_IN, looks, save, style

__all__ = [
    "COLOURS", "COLUMN_IN", "PAGE_IN", "NoReport", "Plots", "Report", "attainment", "blocking", "differences",
    "draw_workload", "goodput", "looks", "matrix", "parameter", "save", "slo_scale", "style", "tbt_cdf", "timeline",
    "ttft_cdf", "workload_figure", "worst_blocking",
]  # fmt: skip


class Report(Protocol):
    """What `report=` names: something made of a run that is over."""

    def write(self, result: Result, folder: Path, title: str) -> list[Path]:
        """Writes it into the run's folder; returns the paths of its files."""
        ...


class NoReport:
    """The report `none`: no figures."""

    def write(self, result: Result, folder: Path, title: str) -> list[Path]:
        """Draws nothing."""
        return []


@dataclass(frozen=True)
class Plots:
    """The report `plots`, in the format `png`, `pdf` or `svg`: `ttft`, the TTFT of each class against its SLO,
    `tbt`, likewise where tokens were decoded, and `worst_blocking`, the window around the worst head-of-line blocking.

    Raises:
        ValueError: another format.
    """

    format: str = "png"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(unknown("report.format", self.format, FORMATS))

    def write(self, result: Result, folder: Path, title: str) -> list[Path]:
        """Draws the run's figures into a folder; returns their paths."""
        paths = [save(ttft_cdf(result, title), folder / f"ttft.{self.format}")]
        if not np.isnan(result.tables["requests"]["tbt_max_s"]).all():  # somebody got a second token
            paths.append(save(tbt_cdf(result, title), folder / f"tbt.{self.format}"))
        if not np.isnan(result.tables["requests"]["start_s"]).all():  # somebody got to a GPU
            paths.append(save(worst_blocking(result, title), folder / f"worst_blocking.{self.format}"))
        return paths


def draw_workload(requests: Sequence[Request], path: Path, title: str) -> None:
    """Writes `workload_figure` to a file."""
    save(workload_figure(requests, title), path)
