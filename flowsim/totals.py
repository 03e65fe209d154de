"""What the events of a run add up to, as far as its summary needs them: block by block, so that none has to be kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flowsim.log import Columns

__all__ = ["Totals"]

Array = npt.NDArray[Any]


@dataclass(slots=True)
class Totals:
    """Sums over segments, batches and preemptions; of the flags each blocking time, for their quantiles.

    The methods take rows in the order of the log, the rows of one batch together.
    """

    busy_s: Array = field(default_factory=lambda: np.zeros(0))
    """By instance, how long its GPUs were kept, taking over and meeting at stops included."""
    last_end_s: float = 0.0
    batches: int = 0
    multi: int = 0
    requests_in_multi: int = 0
    paused: int = 0
    _blocking_s: list[Array] = field(default_factory=list)

    @staticmethod
    def of(tables: Mapping[str, Columns]) -> Totals:
        """Of whole tables."""
        totals = Totals()
        totals.add_segments(tables["segments"])
        totals.add_batches(tables["batches"])
        totals.add_preemptions(tables["preemptions"])
        return totals

    @property
    def blocking_s(self) -> Array:
        """Of each flag, from when it was raised to its acknowledgement."""
        return np.concatenate([np.zeros(0), *self._blocking_s])

    def add_segments(self, rows: Columns) -> None:
        """More segments."""
        lasted_s = rows["end_s"] - rows["start_s"] + rows["switch_s"] + rows["barrier_s"]
        instance = rows["instance"].astype(np.int64, copy=False)
        busy_s = np.bincount(instance, weights=lasted_s, minlength=len(self.busy_s))
        self.busy_s = busy_s + np.pad(self.busy_s, (0, len(busy_s) - len(self.busy_s)))
        self.last_end_s = float(rows["end_s"].max(initial=self.last_end_s))

    def add_batches(self, rows: Columns) -> None:
        """More members of batches."""
        numbers, members = np.unique(rows["batch"], return_counts=True)
        multi = members[members > 1]
        self.batches = max(self.batches, int(numbers.max(initial=-1.0)) + 1)
        self.multi += len(multi)
        self.requests_in_multi += int(multi.sum())

    def add_preemptions(self, rows: Columns) -> None:
        """More flags."""
        self.paused += int(rows["paused"].sum())
        self._blocking_s.append(rows["stopped_s"] - rows["flagged_s"])
