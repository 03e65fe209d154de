"""Searches of several cells at once for the value at which their attainment crosses a target.

All searches take their steps together, so that their runs fill the workers, and a search's answer does not depend
on who else searches. This module must not know which setting is searched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowsim.study.attained import Shares, confidence, crossing, shares, worst
from flowsim.study.cells import Cell
from flowsim.study.runs import Run, Runs
from flowsim.study.search import Search

__all__ = ["Target", "Threshold", "seek"]


@dataclass(frozen=True)
class Target:
    """What has to be met: the share `share` of requests by the figure `measure`, by each class if `per_class`."""

    share: float
    measure: str
    per_class: bool

    def read(self, run: Run) -> Shares:
        return shares(run.record.figures or {}, self.measure, per_class=self.per_class)


@dataclass
class Threshold:
    """One cell's search. `seen` holds, for each value tried, the shares of each seed."""

    cell: Cell
    search: Search
    target: Target
    seen: dict[float, list[Shares]] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    error: str | None = None

    def take(self, value: float, runs: Sequence[Run]) -> None:
        """What the runs at a value, one per seed, came to."""
        self.runs += runs
        failed = next((run.record.error for run in runs if run.record.error is not None), None)
        if failed is not None:
            self.error = failed
            return
        self.seen[value] = [self.target.read(run) for run in runs]
        self.search.tell(value, holds=self.attained(value) >= self.target.share)

    def ask(self) -> float | None:
        """The value to try next."""
        return None if self.error is not None else self.search.ask()

    def attained(self, value: float) -> float:
        """The attainment at a value that was tried."""
        return worst(self.seen[value])

    def interval(self) -> tuple[float, float] | None:
        """The confidence interval of the answer; None where there is none to be had."""
        if self.search.held is None or self.error is not None:
            return None
        return confidence(self.search.held, self.crossings())

    def crossings(self) -> list[float | None]:
        """Where each seed's own attainment crosses the target; None where it does not among the values tried."""
        seeds = range(len(next(iter(self.seen.values()))))
        by_seed = [{value: worst([of[seed]]) for value, of in self.seen.items()} for seed in seeds]
        return [crossing(attained, self.target.share) for attained in by_seed]


def seek(
    thresholds: Sequence[Threshold],
    setting: Callable[[float], Mapping[str, Any]],
    *,
    runs: Runs,
    seeds: Sequence[int],
) -> None:
    """Takes every search to its end.

    Args:
        thresholds: searches; each keeps what it finds.
        setting: the changes to a cell that a value means.
        runs: does and keeps the runs.
        seeds: of each value tried; common random numbers make attainment fall smoothly.

    Raises:
        StudyError: no run came to an end.
        ValueError: there is no attainment to read.
    """
    while True:
        asked = [(one, value) for one in thresholds if (value := one.ask()) is not None]
        if not asked:
            return
        changes = [setting(value) for _, value in asked]
        points = [
            (one.cell.at(change), seed) for (one, _), change in zip(asked, changes, strict=True) for seed in seeds
        ]
        coming = sum(max(one.search.left - 1, 0) for one, _ in asked) * len(seeds)
        found = runs.of(points, varied=list(changes[0]), coming=coming)
        for place, (one, value) in enumerate(asked):
            one.take(value, found[place * len(seeds) : (place + 1) * len(seeds)])
