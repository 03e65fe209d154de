"""What every experiment of the paper's reproduction is made of, and how one is run, kept and drawn.

The runs of an experiment are its configuration, `conf/experiment/NAME.yaml`: the set-up, the study and its grid, which
`python -m flowsim +experiment=NAME` runs as well. Its module, `experiments/NAME.py`, adds what the paper says, the
figure, and the words. `experiments/results/` keeps the tables, from which docs/reproduction.md is written.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from rich.console import Console

import flowsim
from flowsim.config import compose
from flowsim.metrics import Result
from flowsim.report.plots import save

__all__ = ["GOODPUT", "Claim", "Experiment", "between", "command", "crossing", "kept", "main", "one", "run"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
IMAGES = ROOT / "docs" / "img"
ABOUT = "about.json"
GOODPUT = ("goodput_rps", "goodput_rps_low", "goodput_rps_high", "attained", "num_requests", "seeds")
NAMES = {
    "workload.rate_rps": "rate_rps",
    "workload.slo_scale": "slo_scale",
}


@dataclass(frozen=True)
class Claim:
    """One figure of the paper beside ours. `published` is "-" where it states none; `holds` is None where nothing is
    stated to hold it against."""

    what: str
    published: str
    ours: str
    holds: bool | None = None


@dataclass(frozen=True)
class Experiment:
    """A study of the paper.

    `columns` are kept of the study's table, `shaped` makes the table to draw and to read from it; `draw`, `claims` and
    `words` take that one. `words` say what is seen, and why it differs from the paper where it does.
    """

    name: str
    title: str
    columns: Sequence[str]
    draw: Callable[[pd.DataFrame], Figure]
    claims: Callable[[pd.DataFrame], list[Claim]]
    words: Callable[[pd.DataFrame], str]
    shaped: Callable[[pd.DataFrame], pd.DataFrame] = lambda table: table
    measure: Callable[[Result], Mapping[str, Any]] | None = None


def command(experiment: Experiment) -> str:
    """What runs it."""
    return f"python -m experiments.{experiment.name}"


def run(experiment: Experiment, *, jobs: int, extra: Sequence[str] = (), folder: Path | None = None) -> pd.DataFrame:
    """Runs the study of its configuration.

    Args:
        experiment: which one.
        jobs: processes; -1 for one a core.
        extra: overrides, such as a smaller `workload.num_requests`.
        folder: where finished runs are kept, so that an interrupted study goes on.
    """
    overrides = [f"+experiment={experiment.name}", *extra]
    config = compose(overrides)
    task: dict[str, Any] = OmegaConf.to_container(config.task, resolve=True)  # type: ignore[assignment]
    name = task.pop("_target_").rpartition(".")[2]
    study = {"Sweep": flowsim.sweep, "Goodput": flowsim.goodput, "SLOScale": flowsim.slo_scale}[name]
    options = {key: task[key] for key in ("seeds", "precision", "scales", "target") if task.get(key) is not None}
    found = study(overrides, task["grid"], jobs=jobs, folder=folder, measure=experiment.measure, **options)
    if name == "SLOScale":
        size = {name: found.table[name].max() for name in ("num_requests", "seeds")}
        found = found.curve.rename(columns={"attained": "attainment"}).assign(**size)
    table: pd.DataFrame = found if name != "Goodput" else found.table
    return _named(table)[list(experiment.columns)]


def _named(table: pd.DataFrame) -> pd.DataFrame:
    """Columns under the names that figures know: what was asked for, not what was drawn."""
    names = {old: new for old, new in NAMES.items() if old in table.columns}
    return table.drop(columns=[new for new in names.values() if new in table.columns]).rename(columns=names)


def kept(experiment: Experiment, folder: Path = RESULTS) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The table of its last run, shaped, and what is known of that run.

    Raises:
        FileNotFoundError: it has not been run.
    """
    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    return experiment.shaped(pd.read_csv(folder / f"{experiment.name}.csv")), about[experiment.name]


def keep(experiment: Experiment, table: pd.DataFrame, about: Mapping[str, Any], folder: Path = RESULTS) -> None:
    """Writes the table, and what is known of its run, for `kept`."""
    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / f"{experiment.name}.csv", index=False, float_format="%.6g", lineterminator="\n")
    path = folder / ABOUT
    everything = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    everything[experiment.name] = dict(about)
    path.write_text(json.dumps(dict(sorted(everything.items())), indent=2) + "\n", encoding="utf-8")


def reproduce(experiment: Experiment, *, jobs: int, extra: Sequence[str], results: Path, images: Path) -> pd.DataFrame:
    """Runs, keeps and draws it; answers the shaped table."""
    began_s, began_cpu_s = perf_counter(), _processor_s()
    table = run(experiment, jobs=jobs, extra=extra, folder=ROOT / "outputs" / "experiments" / experiment.name)
    _end_workers()
    about = {
        "command": command(experiment),
        "date": datetime.date.today().isoformat(),
        "flowsim": flowsim.__version__,
        "wall_s": round(perf_counter() - began_s, 1),
        "processor_s": round(_processor_s() - began_cpu_s, 1),
        "cores": os.cpu_count(),
    }
    keep(experiment, table, about, results)
    shaped, _ = kept(experiment, results)
    save(experiment.draw(shaped), images / f"paper_{experiment.name}.png")
    return shaped


def _processor_s() -> float:
    """Of this process and its children that have ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _end_workers() -> None:
    """Ends joblib's processes, whose time counts only then."""
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor().shutdown(wait=True)


def main(experiment: Experiment, arguments: Sequence[str] | None = None) -> None:
    """The command `python -m experiments.NAME`: runs it, draws it and prints its claims."""
    parser = argparse.ArgumentParser(prog=command(experiment), description=experiment.title)
    parser.add_argument("overrides", nargs="*", help="such as workload.num_requests=500; then nothing is kept")
    parser.add_argument("--jobs", type=int, default=-1, help="processes; -1 for one a core")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    if options.overrides:
        table = experiment.shaped(run(experiment, jobs=options.jobs, extra=options.overrides))
        console.print(table.to_string(), soft_wrap=True)
    else:
        table = reproduce(experiment, jobs=options.jobs, extra=(), results=RESULTS, images=IMAGES)
    for claim in experiment.claims(table):
        console.print(f"{claim.what}: {claim.ours} (published {claim.published}){_verdict(claim)}", soft_wrap=True)


def _verdict(claim: Claim) -> str:
    return {None: "", True: ", holds", False: ", DIFFERS"}[claim.holds]


# ---------------------------------------------------------------- reading tables


def one(table: pd.DataFrame, column: str, **where: Any) -> float:
    """The mean of a column over the rows with these values.

    Raises:
        KeyError: there are no such rows.
    """
    rows = table
    for name, value in where.items():
        rows = rows[rows[name] == value]
    if rows.empty:
        raise KeyError(f"no row with {where}")
    return float(rows[column].mean())


def between(value: float, low: float, high: float) -> bool:
    """Whether a value, as it is printed with two digits after the point, is within a published range."""
    return low <= round(value, 2) <= high


def crossing(table: pd.DataFrame, x: str, y: str = "attainment", target: float = 0.9) -> float:
    """Where the mean of y over seeds first falls below the target as x grows: linear between the points around it.

    NaN where it never does, or is below at the first x.
    """
    means = table.groupby(x)[y].mean().sort_index()
    for (x0, y0), (x1, y1) in zip(means.items(), list(means.items())[1:], strict=False):
        if y0 >= target > y1:
            return float(x0 + (x1 - x0) * (y0 - target) / (y0 - y1))  # type: ignore[operator]
    return float("nan")
