"""`goodput`: the highest rate that each cell of a grid serves within its SLOs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowsim.study.attained import checked_target
from flowsim.study.bounds import Bounds, check_bounded, seek_bounds
from flowsim.study.cells import Cell, Grid, cells_of, checked_seeds
from flowsim.study.points import Measure
from flowsim.study.runs import Runs
from flowsim.study.search import Search
from flowsim.study.thresholds import Target, Threshold, seek
from flowsim.study.workers import Progress, Workers

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Goodput", "goodput"]

RATE = "workload.rate_rps"
START_RPS = 4.0  # where a workload states no rate


@dataclass(frozen=True)
class Goodput:
    """`table`: a row per cell; `curve`: a row per cell and rate tried; `evaluations`: a row per run of the search;
    `bounds`: a row per bound that was computed, None where none was asked for."""

    table: pd.DataFrame
    curve: pd.DataFrame
    evaluations: pd.DataFrame
    bounds: pd.DataFrame | None = None


def goodput(
    overrides: Sequence[str] = (),
    grid: Grid | None = None,
    *,
    target: float = 0.9,
    seeds: Sequence[int] = (0, 1, 2),
    per_class: bool = False,
    attained: str = "attainment",
    low_rps: float = 0.05,
    high_rps: float = 500.0,
    start_rps: float | None = None,
    precision: float = 0.01,
    bound: bool = False,
    measure: Measure | None = None,
    folder: str | Path | None = None,
    jobs: int = -1,
    backend: str = "loky",
    config_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Goodput:
    """The highest rate at which at least `target` of the requests meet their SLOs, for each cell of a grid.

    The rate is doubled or halved from `start_rps` until it is bracketed, then bisected. Attainment is the mean over
    the seeds, and the same seeds are used at every rate (common random numbers: the rate scales the gaps between
    arrivals, and nothing else). It is taken to fall with the rate.

    ::

        flowsim.goodput(["gpu=h100"], {"policy": ["fcfs", "flowprefill"]}).table

    Args:
        overrides, grid, measure, folder, jobs, backend, config_dir, progress: as in `sweep`.
        target: the share of requests, within 0..1.
        seeds: at least two for a confidence interval.
        per_class: the target holds for each class, not for all requests together.
        attained: the figure that is held against the target; with `per_class`, its `_by_class`.
        low_rps, high_rps: the rates within which it is looked for.
        start_rps: the first rate; by default the workload's.
        precision: the relative distance between the rate that holds and the one that fails, at the end.
        bound: also look for the rate beyond which no schedule whatever keeps the target (`flowsim.bound`), on the same
            workloads; about four times the time of a fast policy's search. Cells that differ in their policy share
            it. It is on TTFT: of `attained` only `attainment` and `joint_attainment` have one.

    Returns:
        `table` has the axes, `goodput_rps` (NaN where even `low_rps` fails), `goodput_rps_low` and
        `goodput_rps_high` (95 %, Student's t over the seeds' own goodputs; NaN where there is none), `attained` at
        that rate, `bracket_end` (`low` or `high` where that end was hit, so that the goodput is beyond it),
        `num_requests`, `seeds`, `runs`, `target`, `per_class`, `error`, and the settings; with `bound` also `bound_rps`
        (any schedule) and `bound_alone_rps` (any that runs prompts one by one), the lowest rates tried at which even
        the bound misses the target, `bound_share` and `bound_alone_share`, the goodput as shares of them, each with
        `_low` and `_high`, and `bound_end` and `bound_alone_end`, as `bracket_end`. `curve` has the axes, each
        rate tried and `attained` there, the mean over the seeds. `evaluations` has every run, as `sweep` answers it.

    Raises:
        ValueError: a value out of its range, an unknown key or choice, no SLO to hold, a closed loop; with `bound`
            what has none: pools of different hardware to prefill in, speeds that are drawn, a prefix cache that finds
            something.
        OSError: the folder cannot be written.

    Warns:
        StudyWarning: some runs failed.
    """
    cells, chosen = cells_of(overrides, grid, config_dir=config_dir, measure=measure), checked_seeds(seeds)
    wanted = Target(checked_target(target), attained, per_class)
    thresholds = [
        Threshold(cell, Search(low_rps, high_rps, _start(cell, start_rps, low_rps, high_rps), precision), wanted)
        for cell in cells
    ]
    if bound:
        check_bounded(cells, attained, chosen[0])
    with Workers(jobs=jobs, backend=backend, folder=folder, progress=progress) as workers:
        runs = Runs(workers)
        seek(thresholds, _setting, runs=runs, seeds=chosen)
        bounds = seek_bounds(thresholds, _setting, workers=workers, seeds=chosen) if bound else None
    runs.warn()
    import pandas as pd

    table = pd.DataFrame([_row(one, len(chosen), place, bounds) for place, one in enumerate(thresholds)])
    curve = [
        {**one.cell.labels, RATE: rate_rps, "attained": one.attained(rate_rps)}
        for one in thresholds
        for rate_rps in sorted(one.seen)
    ]
    return Goodput(table, pd.DataFrame(curve), runs.table(), None if bounds is None else bounds.table())


def _setting(rate_rps: float) -> Mapping[str, Any]:
    return {RATE: rate_rps}


def _start(cell: Cell, start_rps: float | None, low_rps: float, high_rps: float) -> float:
    """The first rate of a cell: the one given, or its workload's."""
    _, settings = cell.point(0, 0)
    try:
        cell.at({RATE: START_RPS}).point(0, 0)
    except ValueError as error:
        name = settings["workload"]
        raise ValueError(
            f"goodput varies {RATE}, which {name} does not have (a closed loop has no rate, nor has a list of requests)"
        ) from error
    return start_rps or min(max(settings.get(RATE) or START_RPS, low_rps), high_rps)


def _row(found: Threshold, seeds: int, place: int, bounds: Bounds | None) -> dict[str, Any]:
    search, last = found.search, found.runs[-1]
    ci_rps = found.interval()
    held = search.held if found.error is None else None
    at_best = next((run for run in found.runs if run.front[RATE] == held), last)
    row = {
        **found.cell.labels,
        "goodput_rps": math.nan if held is None else held,
        "goodput_rps_low": ci_rps[0] if ci_rps else math.nan,
        "goodput_rps_high": ci_rps[1] if ci_rps else math.nan,
        "attained": math.nan if held is None else found.attained(held),
        "bracket_end": search.end,
        "num_requests": (at_best.record.figures or {}).get("requests"),
        "seeds": seeds,
        "runs": len(found.runs),
        "target": found.target.share,
        "per_class": found.target.per_class,
    }
    error = found.error
    if bounds is not None:
        for prefix, one in bounds.beside(place, found).items():
            row |= {f"{prefix}_rps": one.value, f"{prefix}_share": one.share, f"{prefix}_end": one.end}
            row |= {f"{prefix}_share_low": one.low, f"{prefix}_share_high": one.high}
        error = error or bounds.error(place)
    row["error"] = error
    return {**row, **{name: value for name, value in last.settings.items() if name not in row}}
