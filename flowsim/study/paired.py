"""`compare`: cells of a grid held against one of them, seed by seed on the same workloads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowsim.names import unknown
from flowsim.study.attained import half_width
from flowsim.study.cells import Cell, Grid, cells_of, checked_seeds
from flowsim.study.points import Measure
from flowsim.study.runs import Run, Runs
from flowsim.study.workers import Progress, Workers

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FIGURES", "Comparison", "compare"]

FIGURES = ("attainment", "ttft_s.mean", "ttft_s.p50", "ttft_s.p90", "ttft_s.p99")


@dataclass(frozen=True)
class Comparison:
    """`table`: a row per cell and figure, with its difference from the baseline; `evaluations`: a row per run."""

    table: pd.DataFrame
    evaluations: pd.DataFrame


def compare(
    overrides: Sequence[str] = (),
    grid: Grid | None = None,
    *,
    baseline: str | None = None,
    figures: Sequence[str] = FIGURES,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    measure: Measure | None = None,
    folder: str | Path | None = None,
    jobs: int = -1,
    backend: str = "loky",
    config_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Runs every cell on the same workloads, one for each seed, and pairs them with the baseline's by the seed.

    ::

        flowsim.compare(["workload.rate_rps=6"], {"policy": ["chunked_2k", "flowprefill"]}).table

    Args:
        overrides, grid, measure, folder, jobs, backend, config_dir, progress: as in `sweep`.
        baseline: the cell that the others are held against, by its label (of several axes, joined with blanks);
            the first by default.
        figures: the columns of `evaluations` to compare.
        seeds: at least two for intervals.

    Returns:
        `table` has the axes, `figure`, its mean over the seeds `mean` and the baseline's `baseline`, the mean of the
        paired differences `difference` with a 95 % interval `difference_low`, `difference_high` (Student's t; NaN
        with one seed), `ratio` of the means, and `seeds`, the pairs that both have.

    Raises:
        ValueError: fewer than two cells, an unknown figure or baseline, and as in `sweep`.
        OSError: the folder cannot be written.

    Warns:
        StudyWarning: some runs failed.
    """
    cells = cells_of(overrides, grid, config_dir=config_dir, measure=measure)
    chosen = checked_seeds(seeds)
    if len(cells) < 2:
        raise ValueError("there is one cell; comparing takes at least two, such as {'policy': ['fcfs', 'flowprefill']}")
    base = _baseline(cells, baseline)
    with Workers(jobs=jobs, backend=backend, folder=folder, progress=progress) as workers:
        runs = Runs(workers)
        found = runs.of([(cell, seed) for cell in cells for seed in chosen])
    runs.warn()
    known = dict.fromkeys(name for run in found for name in run.record.figures or {})
    for name in figures:
        if name not in known:
            raise ValueError(unknown("figure", name, known))
    by_cell = [found[place * len(chosen) : (place + 1) * len(chosen)] for place in range(len(cells))]
    import pandas as pd

    rows = [_row(cell, name, of, by_cell[base]) for cell, of in zip(cells, by_cell, strict=True) for name in figures]
    return Comparison(pd.DataFrame(rows), runs.table())


def name_of(cell: Cell) -> str:
    """A cell's labels in one text."""
    return " ".join(str(text) for text in cell.labels.values())


def _baseline(cells: Sequence[Cell], name: str | None) -> int:
    names = [name_of(cell) for cell in cells]
    if name is None:
        return 0
    if name not in names:
        raise ValueError(unknown("baseline", name, names))
    return names.index(name)


def _row(cell: Cell, name: str, runs: Sequence[Run], base: Sequence[Run]) -> dict[str, Any]:
    """One figure of one cell beside the baseline's, over the seeds for which both have it."""
    both = [(_figure(run, name), _figure(other, name)) for run, other in zip(runs, base, strict=True)]
    pairs = [(own, others) for own, others in both if own is not None and others is not None]
    differences = [own - others for own, others in pairs]
    mean, of_base, difference = (
        math.fsum(column) / len(pairs) if pairs else math.nan
        for column in ([own for own, _ in pairs], [others for _, others in pairs], differences)
    )
    half = half_width(differences) if len(pairs) > 1 else math.nan
    if runs is base:
        difference, half = 0.0, 0.0
    return {
        **cell.labels,
        "figure": name,
        "mean": mean,
        "baseline": of_base,
        "difference": difference,
        "difference_low": difference - half,
        "difference_high": difference + half,
        "ratio": mean / of_base if of_base else math.nan,
        "seeds": len(pairs),
    }


def _figure(run: Run, name: str) -> float | None:
    value = (run.record.figures or {}).get(name)
    return None if value is None else float(value)
