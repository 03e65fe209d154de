"""`slo_scale`: attainment over a grid of SLO scales, and the strictest scale that each cell still meets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowsim.study.attained import checked_target
from flowsim.study.bounds import Bounds, check_bounded, seek_bounds
from flowsim.study.cells import Grid, cells_of, checked_seeds
from flowsim.study.points import Measure
from flowsim.study.runs import Runs
from flowsim.study.search import Search
from flowsim.study.thresholds import Target, Threshold, seek
from flowsim.study.workers import Progress, Workers

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SCALES", "SLOScale", "slo_scale"]

SCALE = "workload.slo_scale"
ENDS = {"low": "loosest", "high": "strictest", None: None}
SCALES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)


@dataclass(frozen=True)
class SLOScale:
    """`table`: a row per cell; `curve`: a row per cell and scale; `evaluations`: a row per run; `bounds`: a row per
    bound that was computed, None where none was asked for."""

    table: pd.DataFrame
    curve: pd.DataFrame
    evaluations: pd.DataFrame
    bounds: pd.DataFrame | None = None


def slo_scale(
    overrides: Sequence[str] = (),
    grid: Grid | None = None,
    *,
    scales: Sequence[float] = SCALES,
    target: float = 0.9,
    seeds: Sequence[int] = (0, 1, 2),
    per_class: bool = False,
    attained: str = "attainment",
    precision: float = 0.01,
    bound: bool = False,
    measure: Measure | None = None,
    folder: str | Path | None = None,
    jobs: int = -1,
    backend: str = "loky",
    config_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> SLOScale:
    """Attainment at each SLO scale (all TTFT SLOs multiplied by it) and a fixed rate, for each cell of a grid.

    The strictest scale that meets the target is looked for between the strictest of `scales` at which it and every
    looser one meet it, and the next stricter one, by bisection.

    Args:
        overrides, grid, measure, folder, jobs, backend, config_dir, progress: as in `sweep`.
        scales: factors on the SLOs; above 0.
        target, seeds, per_class, attained, precision: as in `goodput`.
        bound: also look for the scale beyond which no schedule whatever keeps the target, as in `goodput`.

    Returns:
        `table` has the axes, `slo_scale` (the strictest; NaN where even the loosest fails), `slo_scale_low` and
        `slo_scale_high` (as in `goodput`), `attained` there, `bracket_end` (`strictest` or `loosest` where that scale
        was hit), `num_requests`, `seeds`, `runs`, `target`, `per_class`, `error`, and the settings; with `bound` also
        `bound_scale` and `bound_alone_scale`, the loosest tried at which even the bound misses the target,
        `bound_share` and `bound_alone_share`, those over the cell's, each with `_low` and `_high`, and `bound_end` and
        `bound_alone_end`, as `bracket_end`. `curve` has the axes, each scale tried and `attained` there, the mean over
        the seeds. `evaluations` has every run.

    Raises:
        ValueError: a value out of its range, an unknown key or choice, no SLO to hold; with `bound` as in `goodput`.
        OSError: the folder cannot be written.

    Warns:
        StudyWarning: some runs failed.
    """
    cells, chosen = cells_of(overrides, grid, config_dir=config_dir, measure=measure), checked_seeds(seeds)
    wanted = Target(checked_target(target), attained, per_class)
    strictness = sorted(1.0 / scale for scale in _checked_scales(scales))
    thresholds = [
        Threshold(cell, Search(strictness[0], strictness[-1], strictness[0], precision), wanted) for cell in cells
    ]
    if bound:
        check_bounded(cells, attained, chosen[0])
    with Workers(jobs=jobs, backend=backend, folder=folder, progress=progress) as workers:
        runs = Runs(workers)
        points = [(cell.at(_setting(x)), seed) for cell in cells for x in strictness for seed in chosen]
        found = iter(runs.of(points, varied=[SCALE], coming=len(cells) * len(chosen) * thresholds[0].search.left))
        for one in thresholds:
            tried = [(x, [next(found) for _ in chosen]) for x in strictness]
            _take_grid(one, tried)
        seek(thresholds, _setting, runs=runs, seeds=chosen)
        bounds = seek_bounds(thresholds, _setting, workers=workers, seeds=chosen) if bound else None
    runs.warn()
    import pandas as pd

    table = pd.DataFrame([_row(one, len(chosen), place, bounds) for place, one in enumerate(thresholds)])
    curve = [
        {**one.cell.labels, SCALE: 1.0 / x, "attained": one.attained(x)}
        for one in thresholds
        for x in sorted(one.seen, reverse=True)
    ]
    return SLOScale(table, pd.DataFrame(curve), runs.table(), None if bounds is None else bounds.table())


def _setting(strictness: float) -> Mapping[str, Any]:
    """Twice as strict is half the scale."""
    return {SCALE: 1.0 / strictness}


def _take_grid(threshold: Threshold, tried: Sequence[tuple[float, list[Any]]]) -> None:
    """Takes the grid from loose to strict; past the first scale that fails only the runs are kept."""
    for strictness, runs in tried:
        search = threshold.search
        held, failed = search.held, search.failed
        threshold.take(strictness, runs)
        if failed is not None:
            search.held, search.failed = held, failed


def _checked_scales(scales: Sequence[float]) -> Sequence[float]:
    found = list(scales)
    if not found or not all(isinstance(scale, int | float) and scale > 0.0 for scale in found):
        raise ValueError(f"scales is {found!r}; it must be a list of numbers above 0, such as [0.5, 1, 2]")
    if len(set(found)) < len(found):
        raise ValueError(f"scales is {found!r}; one is there twice")
    return found


def _row(found: Threshold, seeds: int, place: int, bounds: Bounds | None) -> dict[str, Any]:
    search, last = found.search, found.runs[-1]
    interval = found.interval()
    held = search.held if found.error is None else None
    row = {
        **found.cell.labels,
        "slo_scale": math.nan if held is None else 1.0 / held,
        "slo_scale_low": 1.0 / interval[1] if interval else math.nan,
        "slo_scale_high": 1.0 / interval[0] if interval else math.nan,
        "attained": math.nan if held is None else found.attained(held),
        "bracket_end": ENDS[search.end],
        "num_requests": (last.record.figures or {}).get("requests"),
        "seeds": seeds,
        "runs": len(found.runs),
        "target": found.target.share,
        "per_class": found.target.per_class,
    }
    error = found.error
    if bounds is not None:
        for prefix, one in bounds.beside(place, found).items():
            row |= {f"{prefix}_scale": 1.0 / one.value, f"{prefix}_share": one.share, f"{prefix}_end": ENDS[one.end]}
            row |= {f"{prefix}_share_low": one.low, f"{prefix}_share_high": one.high}
        error = error or bounds.error(place)
    row["error"] = error
    return {**row, **{name: value for name, value in last.settings.items() if name not in row}}
