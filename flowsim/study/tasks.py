"""The studies as tasks of the command: their files, their figure, and a few lines on the terminal.

A task is made with the overrides that the command was given, and composes the study's variants from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flowsim.names import unknown
from flowsim.report import studies as figures
from flowsim.study import grid as sweeps
from flowsim.study import paired, rates
from flowsim.study import scales as strictness
from flowsim.study.paired import FIGURES
from flowsim.study.rates import RATE
from flowsim.study.scales import SCALE, SCALES
from flowsim.study.telling import (
    bound_words,
    bounded,
    bounds_of,
    cells,
    curves,
    differences,
    draw,
    ended,
    interval,
    rate_words,
    rows_of,
    say,
    scale_words,
    settings,
    share_of,
    studied,
    write_json,
    write_runs,
)
from flowsim.variants import choices_of

__all__ = ["Compare", "Goodput", "SLOScale", "Sweep"]


@dataclass(frozen=True)
class Goodput:
    """`task=goodput`: `goodput.json`, `evaluations.csv` (every run), `goodput.png`. Keys as of `flowsim.goodput`.

    With a `grid` it is searched in each of its cells: `goodput.csv` has a row for each, and `goodput.json` the same.
    With `bound` all of them have the bound too, and `bounds.csv` a row for each that was computed.
    """

    grid: Mapping[str, Any] | None = None
    target: float = 0.9
    per_class: bool = False
    attained: str = "attainment"
    seeds: Sequence[int] = (0, 1, 2)
    low_rps: float = 0.05
    high_rps: float = 500.0
    start_rps: float | None = None
    precision: float = 0.01
    bound: bool = False
    jobs: int = -1
    backend: str = "loky"
    overrides: Sequence[str] = ()
    config_dir: str | Path | None = None

    def __call__(self, setup: Any, *, title: str, report: Any, folder: Path, quiet: bool) -> int:
        """Searches; returns how many runs it took.

        Raises:
            FailedRunsError: some did not end; the files say which.
        """
        found = studied(
            lambda progress: rates.goodput(
                self.overrides,
                self.grid,
                target=self.target,
                per_class=self.per_class,
                attained=self.attained,
                seeds=self.seeds,
                low_rps=self.low_rps,
                high_rps=self.high_rps,
                start_rps=self.start_rps,
                precision=self.precision,
                bound=self.bound,
                folder=folder,
                jobs=self.jobs,
                backend=self.backend,
                config_dir=self.config_dir,
                progress=progress,
            ),
            folder,
            quiet,
        )
        if self.grid:
            return by_cell(found, list(self.grid), "goodput", "goodput_rps", report=report, folder=folder, quiet=quiet)
        row = rows_of(found.table)[0]
        curve = rows_of(found.curve)
        write_json(
            folder / "goodput.json",
            {
                "goodput_rps": row["goodput_rps"],
                "ci": interval(row, "goodput_rps"),
                "target": self.target,
                "num_requests": row["num_requests"],
                "per_class": self.per_class,
                "seeds": list(self.seeds),
                "attained": row["attained"],
                "bracket_end": row["bracket_end"],
                "precision": self.precision,
                **bounded(row),
                "evaluations": [{"rate_rps": one[RATE], "attained": one["attained"]} for one in curve],
                "settings": settings(row),
            },
        )
        write_runs(found.evaluations, found.bounds, folder)
        if row["goodput_rps"] is not None or len(curve) > 1:
            draw(report, folder / "goodput", lambda: self._figure(found, row, title))
        if not quiet:
            lines = rate_words(row, self.target, self.per_class)
            say(lines + bound_words(row, "rps"), folder, title)
        return ended(found.evaluations, folder, found.bounds)

    def _figure(self, found: rates.Goodput, row: Mapping[str, Any], title: str) -> Any:
        return figures.search(
            *curves(found.evaluations, RATE, "rate_rps", self.attained, self.per_class, found.bounds),
            found_rps=row["goodput_rps"],
            interval_rps=interval(row, "goodput_rps"),
            target=self.target,
            title=title,
        )


@dataclass(frozen=True)
class SLOScale:
    """`task=slo_scale`: `slo_scale.json`, `evaluations.csv`, `slo_scale.png`. Keys as of `flowsim.slo_scale`.

    With a `grid` each of its cells has a row in `slo_scale.csv` and `slo_scale.json`; `bound` as in `Goodput`.
    """

    grid: Mapping[str, Any] | None = None
    scales: Sequence[float] = SCALES
    target: float = 0.9
    per_class: bool = False
    attained: str = "attainment"
    seeds: Sequence[int] = (0, 1, 2)
    precision: float = 0.01
    bound: bool = False
    jobs: int = -1
    backend: str = "loky"
    overrides: Sequence[str] = ()
    config_dir: str | Path | None = None

    def __call__(self, setup: Any, *, title: str, report: Any, folder: Path, quiet: bool) -> int:
        """Runs the scales; returns how many runs it took.

        Raises:
            FailedRunsError: some did not end; the files say which.
        """
        found = studied(
            lambda progress: strictness.slo_scale(
                self.overrides,
                self.grid,
                scales=self.scales,
                target=self.target,
                per_class=self.per_class,
                attained=self.attained,
                seeds=self.seeds,
                precision=self.precision,
                bound=self.bound,
                folder=folder,
                jobs=self.jobs,
                backend=self.backend,
                config_dir=self.config_dir,
                progress=progress,
            ),
            folder,
            quiet,
        )
        if self.grid:
            return by_cell(found, list(self.grid), "slo_scale", "slo_scale", report=report, folder=folder, quiet=quiet)
        row = rows_of(found.table)[0]
        curve = rows_of(found.curve)
        write_json(
            folder / "slo_scale.json",
            {
                "slo_scale": row["slo_scale"],
                "ci": interval(row, "slo_scale"),
                "target": self.target,
                "rate_rps": row.get(RATE),
                "num_requests": row["num_requests"],
                "per_class": self.per_class,
                "seeds": list(self.seeds),
                "attained": row["attained"],
                "bracket_end": row["bracket_end"],
                "precision": self.precision,
                **bounded(row),
                "evaluations": [{"slo_scale": one[SCALE], "attained": one["attained"]} for one in curve],
                "settings": settings(row),
            },
        )
        write_runs(found.evaluations, found.bounds, folder)
        draw(report, folder / "slo_scale", lambda: self._figure(found, title))
        if not quiet:
            lines = scale_words(row, self.target, self.per_class)
            say(lines + bound_words(row, "scale"), folder, title)
        return ended(found.evaluations, folder, found.bounds)

    def _figure(self, found: strictness.SLOScale, title: str) -> Any:
        return figures.scales(
            *curves(found.evaluations, SCALE, "slo_scale", self.attained, self.per_class, found.bounds),
            ticks=self.scales,
            target=self.target,
            title=title,
        )


def by_cell(
    found: rates.Goodput | strictness.SLOScale,
    axes: list[str],
    name: str,
    figure: str,
    *,
    report: Any,
    folder: Path,
    quiet: bool,
) -> int:
    """Writes, draws and shows what a search over a grid found in each cell; returns how many runs it took."""
    found.table.to_csv(folder / f"{name}.csv", index=False)
    write_json(folder / f"{name}.json", rows_of(found.table))
    write_runs(found.evaluations, found.bounds, folder)
    beside = list(bounds_of(found.table, figure.rpartition("_")[2]))
    drawable = found.table[found.table[figure].notna()]
    if len(drawable):
        draw(report, folder / name, lambda: figures.grid(drawable, axes, figure, bounds=beside))
    if not quiet:
        console = Console(markup=False)
        console.print(cells(found.table, axes, figure, [one for name in beside for one in (name, share_of(name))]))
        console.print(f"results in {folder}", highlight=False, soft_wrap=True)
    return ended(found.evaluations, folder, found.bounds)


@dataclass(frozen=True)
class Compare:
    """`task=compare`: `differences.csv`, `compare.json`, `evaluations.csv`, `compare.png`. Keys as of
    `flowsim.compare`, of policies."""

    policies: Sequence[str]
    baseline: str | None = None
    figures: Sequence[str] = FIGURES
    seeds: Sequence[int] = (0, 1, 2, 3, 4)
    jobs: int = -1
    backend: str = "loky"
    overrides: Sequence[str] = ()
    config_dir: str | Path | None = None

    def __call__(self, setup: Any, *, title: str, report: Any, folder: Path, quiet: bool) -> int:
        """Compares; returns how many runs it took.

        Raises:
            ValueError: an unknown policy or baseline.
            FailedRunsError: some did not end; the files say which.
        """
        known = choices_of("policy", self.config_dir)
        for name in self.policies:
            if name not in known:
                raise ValueError(unknown("policy", name, known, where="in task.policies"))
        found = studied(
            lambda progress: paired.compare(
                self.overrides,
                {"policy": list(self.policies)},
                baseline=self.baseline,
                figures=self.figures,
                seeds=self.seeds,
                folder=folder,
                jobs=self.jobs,
                backend=self.backend,
                config_dir=self.config_dir,
                progress=progress,
            ),
            folder,
            quiet,
        )
        base = self.baseline or self.policies[0]
        rows = rows_of(found.table)
        write_json(folder / "compare.json", {"baseline": base, "seeds": list(self.seeds), "differences": rows})
        found.table.to_csv(folder / "differences.csv", index=False)
        found.evaluations.to_csv(folder / "evaluations.csv", index=False)
        subject = title.partition(" on ")[2]
        draw(report, folder / "compare", lambda: figures.comparison(found.table, against=base, title=subject))
        if not quiet:
            console = Console(markup=False)
            console.print(differences(rows, base, subject, len(self.seeds)))
            console.print(f"results in {folder}", highlight=False, soft_wrap=True)
        return ended(found.evaluations, folder)


@dataclass(frozen=True)
class Sweep:
    """`task=sweep`: `sweep.csv`, `sweep.json`, `sweep.png`: every cell of `grid` (key -> values, crossed) with every
    seed. Hydra composes once for each choice of groups, and not once a run as with `-m`."""

    grid: Mapping[str, Sequence[Any]]
    figure: str = "attainment"
    seeds: Sequence[int] = (0,)
    jobs: int = -1
    backend: str = "loky"
    overrides: Sequence[str] = ()
    config_dir: str | Path | None = None

    def __call__(self, setup: Any, *, title: str, report: Any, folder: Path, quiet: bool) -> int:
        """Runs the grid; returns how many runs ended.

        Raises:
            FailedRunsError: some did not end; the files say which.
        """
        found = studied(
            lambda progress: sweeps.sweep(
                self.overrides,
                self.grid,
                seeds=self.seeds,
                folder=folder,
                jobs=self.jobs,
                backend=self.backend,
                config_dir=self.config_dir,
                progress=progress,
            ),
            folder,
            quiet,
        )
        if self.figure not in found.columns:
            raise ValueError(unknown("task.figure", self.figure, found.columns))
        found.to_csv(folder / "sweep.csv", index=False)
        write_json(folder / "sweep.json", rows_of(found))
        drawable = found[found[self.figure].notna()]
        if len(drawable):
            draw(report, folder / "sweep", lambda: figures.grid(drawable, list(self.grid), self.figure))
        if not quiet:
            console = Console(markup=False)
            console.print(cells(found, list(self.grid), self.figure))
            console.print(f"results in {folder}", highlight=False, soft_wrap=True)
        return ended(found, folder)
