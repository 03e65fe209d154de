"""The runs of a study, collected as it goes, and the tidy table that they are. Knows no study by name."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowsim.study.cells import Cell
from flowsim.study.points import Figures, Point, Record
from flowsim.study.workers import Workers

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Run", "Runs", "StudyError", "StudyWarning"]


class StudyError(ValueError):
    """No run of a study came to an end; the message is that of the first."""


class StudyWarning(RuntimeWarning):
    """Some runs of a study failed; the others are in its tables."""


@dataclass(frozen=True)
class Run:
    """A cell run with a seed; `front` are the columns that name it, `settings` all others that are not figures."""

    cell: Cell
    seed: int
    front: Figures
    settings: Figures
    record: Record


class Runs:
    """Runs cells with seeds, and keeps what came of them."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._runs: list[Run] = []

    def of(self, asked: Sequence[tuple[Cell, int]], *, varied: Sequence[str] = (), coming: int = 0) -> list[Run]:
        """Runs them, and answers them in their order.

        Args:
            asked: cells, each with a seed.
            varied: settings that come first in the table, after the labels.
            coming: about how many runs will follow these.

        Raises:
            StudyError: every one failed.
            OSError: finished runs cannot be stored.
        """
        points: list[Point] = []
        fronts: list[Figures] = []
        settings: list[Figures] = []
        for cell, seed in asked:
            point, row = cell.point(len(points), seed)
            first = [*cell.labels, *varied, "seed"]
            points.append(point)
            fronts.append({name: row[name] for name in first})
            settings.append({name: value for name, value in row.items() if name not in first})
        records = self._workers.run(points, fronts, coming)
        if records and all(record.figures is None for record in records):
            raise StudyError(str(records[0].error).removeprefix("ValueError: "))
        cells = [cell for cell, _ in asked]
        seeds = [seed for _, seed in asked]
        found = [Run(*one) for one in zip(cells, seeds, fronts, settings, records, strict=True)]
        self._runs += found
        return found

    def table(self) -> pd.DataFrame:
        """A row per run: what names it, its figures, its error if it failed, and its settings."""
        import pandas as pd

        rows = []
        for run in self._runs:
            figures = run.record.figures or {}
            rest = {name: value for name, value in run.settings.items() if name not in figures}
            rows.append({**run.front, **figures, "error": run.record.error, **rest})
        front = list(dict.fromkeys(name for run in self._runs for name in run.front))
        figures = dict.fromkeys(name for run in self._runs for name in (run.record.figures or {}))
        settings = dict.fromkeys(name for run in self._runs for name in run.settings)
        order = dict.fromkeys([*front, *figures, "error", *settings])
        return pd.DataFrame(rows, columns=list(order))

    def warn(self) -> None:
        """Warns of the runs that failed."""
        failed = [run for run in self._runs if run.record.error is not None]
        if failed:
            first = ", ".join(f"{name}={value}" for name, value in failed[0].front.items())
            warnings.warn(
                f"{len(failed)} of {len(self._runs)} runs failed, see the column `error`; the first, {first}: "
                f"{failed[0].record.error}",
                StudyWarning,
                stacklevel=3,
            )


def text_of(front: Figures) -> str:
    """What names a run, in words."""
    return ", ".join(f"{name}={value}" for name, value in front.items())


def constant(runs: Sequence[Run], besides: Sequence[str]) -> dict[str, Any]:
    """The settings of a cell's runs, without what varies among them."""
    return {name: value for name, value in runs[0].settings.items() if name not in besides} if runs else {}
