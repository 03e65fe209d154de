"""Tasks that judge a run: how far it is from the best possible, and why requests missed. Called as every task is."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowsim.bound import BATCHINGS, Bound
from flowsim.bounded import bound_of, checked_boundable, measured
from flowsim.config import Setup
from flowsim.explain import CAUSES, LOST, Miss, explain, misses_by_cause
from flowsim.keep import need_all
from flowsim.metrics import Result
from flowsim.pool import Pool
from flowsim.report.plots import Report
from flowsim.task import finished, simulated

__all__ = ["Explain", "UpperBound"]

NAMES = {"alone": "any without batching, at most", "perfect": "any, at most"}


class UpperBound:
    """`task=bound`: how many requests any schedule could serve on time, beside what the policy did: `bound.json`.

    Raises:
        ValueError: a set-up that has no bound (`flowsim.bounded`).
    """

    def __call__(self, setup: Setup, *, title: str, report: Report, folder: Path, quiet: bool) -> int:
        """Runs the policy and finds the bounds; returns how many requests finished."""
        checked_boundable(setup)
        need_all(setup.keep, "task=bound")
        result = simulated(setup, title=title, report=report, folder=folder, quiet=quiet)
        of = result.tables["requests"]
        on_time = int(((of["met_slo"] == True) & of["measured"]).sum())  # noqa: E712 (None is neither)
        bounds = [bound_of(setup, measured(setup), batching) for batching in BATCHINGS]
        figures = [asdict(bound) | {"attainment": bound.attainment} for bound in bounds]
        text = json.dumps({"policy_on_time": on_time, "bounds": figures}, indent=2, allow_nan=False)
        (folder / "bound.json").write_text(text + "\n", encoding="utf-8")
        if not quiet:
            Console(markup=False).print(bound_table(bounds, on_time))
        return finished(result)


def bound_table(bounds: Sequence[Bound], on_time: int) -> Table:
    """What the policy did, and each bound with the policy's share of it."""
    requests = bounds[0].requests
    table = _table(f"On time of {requests} requests with an SLO")
    table.add_column("schedule", no_wrap=True)
    for name in ("on time", "share", "policy / it", "load", "took s"):
        table.add_column(name, justify="right")
    table.add_row("this policy", str(on_time), _percent(on_time, requests), "", "", "")
    for bound in bounds:
        shares = [_percent(bound.on_time, requests), _percent(on_time, bound.on_time)]
        load = "-" if bound.load is None else f"{bound.load:.2f}"
        table.add_row(NAMES[bound.batching], str(bound.on_time), *shares, load, f"{bound.wall_s:.1f}")
    return table


class Explain:
    """`task=explain`: why each missed request missed, as `misses.csv` and a table that adds up to all misses.

    Args:
        run: the folder of a finished run to explain; None to run the set-up first.
    """

    def __init__(self, run: str | None = None) -> None:
        self.run = run

    def __call__(self, setup: Setup, *, title: str, report: Report, folder: Path, quiet: bool) -> int:
        """Explains a run; returns how many of its requests finished."""
        if self.run is None:
            need_all(setup.keep, "task=explain")
            result = simulated(setup, title=title, report=report, folder=folder, quiet=quiet)
            predicted_s = _predicted_s(setup)
        else:
            result, predicted_s = Result.load(self.run), None
        misses = explain(result, predicted_s)
        write_misses(misses, folder / "misses.csv")
        if not quiet:
            console = Console(markup=False)
            console.print(cause_table(misses))
            for cause in misses_by_cause(misses):
                console.print(f"{cause}: {CAUSES[cause]}", highlight=False, soft_wrap=True)
            console.print(f"each miss in {folder / 'misses.csv'}", highlight=False, soft_wrap=True)
        return finished(result)


def _predicted_s(setup: Setup) -> Callable[[int], float] | None:
    """What the policy believed of a prompt alone; None where pools differ, as no one belief is the policy's then."""
    pool = setup.cluster
    if not isinstance(pool, Pool):
        return None
    stops = (pool.policy or setup.policy).stops
    return setup.predictor(pool.hardware(setup.latency).bound(pass_tokens=pool.pass_tokens, stops=stops)).alone_s


def write_misses(misses: Sequence[Miss], path: Path) -> None:
    """A row per miss: its cause, and the seconds of its slack by what took them."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["id", "slo_class", "cause", "slack_s", "late_s", *(f"{name}_s" for name in LOST)])
        for miss in misses:
            late_s = "" if math.isnan(miss.late_s) else miss.late_s
            seconds = [miss.lost_s[name] for name in LOST]
            rows.writerow([miss.request, miss.slo_class, miss.cause, miss.slack_s, late_s, *seconds])


def cause_table(misses: Sequence[Miss]) -> Table:
    """Misses by cause and class, and in all."""
    counts = misses_by_cause(misses)
    classes = sorted({miss.slo_class for miss in misses})
    table = _table(f"{len(misses)} requests missed their SLO")
    table.add_column("cause", no_wrap=True)
    for name in (*classes, "all", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for cause, by_class in counts.items():
        total = sum(by_class.values())
        cells = [str(by_class.get(name, 0)) for name in classes]
        table.add_row(cause, *cells, str(total), _percent(total, len(misses)))
    totals = [sum(by_class.get(name, 0) for by_class in counts.values()) for name in classes]
    table.add_section()
    table.add_row("all", *map(str, totals), str(len(misses)), _percent(len(misses), len(misses)))
    return table


def _table(title: str) -> Table:
    return Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "-"
