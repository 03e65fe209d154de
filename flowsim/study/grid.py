"""`sweep`: a grid of configurations, each run with every seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flowsim.study.cells import Grid, cells_of, checked_seeds
from flowsim.study.points import Measure
from flowsim.study.runs import Runs
from flowsim.study.workers import Progress, Workers

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["sweep"]


def sweep(
    overrides: Sequence[str] = (),
    grid: Grid | None = None,
    *,
    seeds: Sequence[int] = (0,),
    measure: Measure | None = None,
    folder: str | Path | None = None,
    jobs: int = -1,
    backend: str = "loky",
    config_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Runs every cell of a grid with every seed; a row per run, with its figures and all its settings.

    ::

        flowsim.sweep(
            ["workload=mixed", "workload.num_requests=2000"],
            {"policy": ["fcfs", "flowprefill"], "workload.rate_rps": [2, 4, 8]},
            seeds=range(3),
        ).groupby(["policy", "workload.rate_rps"]).attainment.mean()

    Args:
        overrides: of every cell, as on the command line.
        grid: axes that are crossed, each a key with its values, or with a mapping of label to value; a value may be
            an object of your own in place of a group (`{"policy": {"mine": MyPolicy()}}`) or a latency model
            (`latency`). An axis with another name maps labels to overrides (`{"chunk": {"2k": ["policy=chunked_2k"],
            ...}}`). Or a list of cells, each a mapping of key to value.
        seeds: of each cell; the same seed draws the same workload in all of them.
        measure: figures of your own from each `Result`, as a mapping, beside those of its summary.
        folder: where finished runs are kept, in `points.jsonl`; a rerun does only what is missing.
        jobs: processes; -1 for one a core, 1 for none beside this one.
        backend: `loky`, `dask` or `ray`.
        config_dir: a folder of your own with groups such as `policy/mine.yaml`.
        progress: called with the runs done and the number of runs.

    Returns:
        Columns: the axes, `seed`, the figures of `summary.json` under dotted names (`ttft_s.p99`), those of
        `measure`, `error` (None, or why the run failed) and the settings (`policy.stops`).

    Raises:
        ValueError: an unknown key or choice, no seeds, and where every run failed, the first one's error.
        OSError: the folder cannot be written.

    Warns:
        StudyWarning: some runs failed.
    """
    cells, chosen = cells_of(overrides, grid, config_dir=config_dir, measure=measure), checked_seeds(seeds)
    with Workers(jobs=jobs, backend=backend, folder=folder, progress=progress) as workers:
        runs = Runs(workers)
        runs.of([(cell, seed) for cell in cells for seed in chosen])
    runs.warn()
    return runs.table()
