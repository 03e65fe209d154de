"""Tasks that judge a run: how far it is from the best possible. Called as every task is (`flowsim.task`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowsim.bound import BATCHINGS, Bound, on_time_bound
from flowsim.config import Setup
from flowsim.pool import Pool
from flowsim.report.plots import NoReport, Plots
from flowsim.task import finished, simulated

__all__ = ["UpperBound"]

NAMES = {"alone": "any without batching, at most", "perfect": "any, at most"}


class UpperBound:
    """`task=bound`: how many requests any schedule could serve on time, beside what the policy did: `bound.json`.

    Raises:
        ValueError: a closed loop, whose arrivals depend on the schedule, ranks whose speeds are drawn, or pools.
    """

    def __call__(self, setup: Setup, *, title: str, report: Plots | NoReport, folder: Path, quiet: bool) -> int:
        """Runs the policy and finds the bounds; returns how many requests finished."""
        if not isinstance(setup.requests, Sequence):
            raise ValueError("task=bound: a closed loop's arrivals depend on the schedule; give it a fixed workload")
        pool = setup.cluster
        if not isinstance(pool, Pool):
            raise ValueError(f"task=bound: the bound is of one pool of equal instances, not of {', '.join(pool.pools)}")
        if pool.jitter_sigma:
            raise ValueError("task=bound: with cluster.jitter_sigma a rank may be faster than the profile; set it to 0")
        result = simulated(setup, title=title, report=report, folder=folder, quiet=quiet)
        on_time = int((result.tables["requests"]["met_slo"] == True).sum())  # noqa: E712 (None is neither)
        latency = pool.hardware(setup.latency).bound(
            pass_tokens=pool.pass_tokens, stops=(pool.policy or setup.policy).stops
        )
        bounds = [
            on_time_bound(setup.requests, latency, instances=pool.instances, batching=batching)
            for batching in BATCHINGS
        ]
        figures = [asdict(bound) | {"attainment": bound.attainment} for bound in bounds]
        text = json.dumps({"policy_on_time": on_time, "bounds": figures}, indent=2)
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
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("this policy", str(on_time), _percent(on_time, requests), "", "", "")
    for bound in bounds:
        shares = [_percent(bound.on_time, requests), _percent(on_time, bound.on_time)]
        table.add_row(NAMES[bound.batching], str(bound.on_time), *shares, f"{bound.load:.2f}", f"{bound.wall_s:.1f}")
    return table


def _table(title: str) -> Table:
    return Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "-"
