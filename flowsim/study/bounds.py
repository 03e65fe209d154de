"""What any schedule could reach, beside what a search found: the same search, over bounds in place of runs.

A search of a cell is repeated with each way of batching that `flowsim.bound` knows; cells that differ in what no bound
depends on, the policy above all, share one. Must not know which setting is searched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from flowsim.bounded import bound_of, checked_boundable, measured, without_ttft
from flowsim.config import Setup
from flowsim.names import unknown
from flowsim.study.attained import confidence
from flowsim.study.cells import Cell
from flowsim.study.runs import Runs
from flowsim.study.thresholds import Target, Threshold, seek
from flowsim.study.workers import Workers
from flowsim.variants import make_setup

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["BOUNDS", "Beside", "Bounds", "check_bounded", "seek_bounds"]

BOUNDS = {"bound": "perfect", "bound_alone": "alone"}
"""What the columns of a bound begin with, and its batching: any schedule, and any that runs prompts one by one."""
BOUNDED = ("attainment", "joint_attainment")
ASIDE = ("policy", "predictor", "router", "keep", "strict")  # no bound depends on them
FIGURES = (
    "attainment",
    "joint_attainment",
    "on_time",
    "requests",
    "impossible",
    "load",
    "rounds",
    "intervals",
    "wall_s",
)


@dataclass(frozen=True)
class Beside:
    """A bound beside a search's answer: the lowest value tried at which even the bound misses the target (where none
    did, the highest tried, and `end` is `high`; NaN where all did, and `end` is `low`), and the answer as a share of
    it, with a 95 % interval paired by seed."""

    value: float
    share: float
    low: float
    high: float
    end: str | None


@dataclass(frozen=True)
class Bounds:
    """The bounds of a study's searches: for each search and each of `BOUNDS` the one that bounds it."""

    runs: Runs
    found: Sequence[Mapping[str, Threshold]]

    def beside(self, place: int, own: Threshold) -> dict[str, Beside]:
        """Each bound of the study's search number `place`."""
        return {prefix: _beside(own, bound) for prefix, bound in self.found[place].items()}

    def error(self, place: int) -> str | None:
        """Why there is no bound, if one failed."""
        return next((one.error for one in self.found[place].values() if one.error is not None), None)

    def table(self) -> pd.DataFrame:
        """A row for each bound that was computed: its cell, `bound` (its batching), what was varied, the seed, and its
        figures."""
        table = self.runs.table()
        settings = list(table.columns)[: list(table.columns).index("seed") + 1]
        return table[[*settings, *(name for name in FIGURES if name in table), "error"]]


def check_bounded(cells: Sequence[Cell], measure: str, seed: int) -> None:
    """Refuses what cannot be bounded, before anything runs.

    Raises:
        ValueError: a figure that no bound is of, or a cell that has none.
    """
    if measure not in BOUNDED:
        raise ValueError(f"{unknown('figure to bound', measure, BOUNDED)}; a bound is on TTFT: give bound=false")
    for cell in cells:
        point, _ = cell.point(0, seed)
        checked_boundable(make_setup(point.settings, point.objects))


def seek_bounds(
    thresholds: Sequence[Threshold],
    setting: Callable[[float], Mapping[str, Any]],
    *,
    workers: Workers,
    seeds: Sequence[int],
) -> Bounds:
    """Looks for the bound of each search, within its limits and from where it began, on the same workloads.

    A target of each class is bounded by that of all requests together, which is no stricter.
    """
    by_key: dict[str, Threshold] = {}
    found = []
    for own in thresholds:
        key = _key(own, setting, seeds[0])
        found.append({
            prefix: by_key.setdefault(f"{batching} {key}", _threshold(own, batching))
            for prefix, batching in BOUNDS.items()
        })  # fmt: skip
    runs = Runs(workers)
    seek(list(by_key.values()), setting, runs=runs, seeds=seeds)
    return Bounds(runs, found)


def figures_of(setup: Setup, *, batching: str) -> dict[str, Any]:
    """The bound of a set-up as figures: `attainment`, `joint_attainment` (an SLO on TBT counts as met), and how it was
    found."""
    requests = measured(setup)
    bound = bound_of(setup, requests, batching)
    without = without_ttft(requests)
    having = bound.requests + without
    return {
        "measured": len(requests),
        "attainment": bound.attainment,
        "joint_attainment": (bound.on_time + without) / having if having else None,
        **{name: getattr(bound, name) for name in FIGURES if name not in BOUNDED},
    }


def _threshold(own: Threshold, batching: str) -> Threshold:
    labels = {name: text for name, text in own.cell.labels.items() if name.partition(".")[0] not in ASIDE}
    cell = replace(
        own.cell, labels={**labels, "bound": batching}, measure=None, work=partial(figures_of, batching=batching)
    )
    return Threshold(cell, replace(own.search), Target(own.target.share, own.target.measure, per_class=False))


def _key(own: Threshold, setting: Callable[[float], Mapping[str, Any]], seed: int) -> str:
    """A digest of all that a cell's bound depends on."""
    point, _ = own.cell.at(setting(own.search.start)).point(0, seed)
    settings = {name: value for name, value in point.settings.items() if name not in ASIDE}
    objects = {name: thing for name, thing in point.objects.items() if name not in ASIDE}
    return replace(point, settings=settings, objects=objects, measure=None).key


def _beside(own: Threshold, bound: Threshold) -> Beside:
    search = bound.search
    value = search.held if search.failed is None else search.failed
    if value is None or search.held is None or bound.error is not None:
        return Beside(math.nan, math.nan, math.nan, math.nan, search.end)
    if own.search.held is None or own.error is not None:
        return Beside(value, math.nan, math.nan, math.nan, search.end)
    share = own.search.held / value
    pairs = zip(own.crossings(), bound.crossings(), strict=True)
    of_seeds = [one / most if one is not None and most is not None else None for one, most in pairs]
    low, high = confidence(share, of_seeds) or (math.nan, math.nan)
    return Beside(value, share, low, high, search.end)
