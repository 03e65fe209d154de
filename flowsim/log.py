"""What happened in a run, written down as it happens: flat tables of floats, one row appended at a time.

Only the executor writes here; `flowsim.metrics` turns the tables into results afterwards.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Columns", "Ended", "Log", "Table"]

Columns = dict[str, npt.NDArray[Any]]
"""A table read: column names to arrays of one length."""


class Ended(enum.Enum):
    """How a segment ended. `PASS`: the batch ended, but some of its prompts have tokens left. `CUT`: by the horizon."""

    FINISHED = "finished"
    PAUSED = "paused"
    PASS = "pass"
    FAILED = "failed"
    CUT = "cut"


class Table:
    """Rows of numbers under named columns, in one flat array: a row costs 8 bytes a column."""

    __slots__ = ("_cells", "add", "columns")

    def __init__(self, *columns: str) -> None:
        self.columns = columns
        self._cells = array("d")
        self.add: Callable[[Iterable[float]], None] = self._cells.extend

    def __len__(self) -> int:
        return len(self._cells) // len(self.columns)

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """One column as an array of its own."""
        cells = np.frombuffer(self._cells, dtype=np.float64) if self._cells else np.empty(0)
        return cells[self.columns.index(name) :: len(self.columns)].copy()


class Log:
    """The tables of one run. Enum columns hold the member's position in its class."""

    def __init__(self) -> None:
        self.requests = Table(
            "id", "start_s", "first_token_s", "finish_s", "blocked_s", "preemptions", "suspended_s",
            "prefill_instance", "outcome", "reason", "decode_instance", "cached_tokens", "evictions",
            "recomputed_tokens",
        )  # fmt: skip
        self.segments = Table(
            "instance", "batch", "start_s", "end_s", "first_op", "last_op", "tokens", "ended", "switch_s", "barrier_s"
        )
        self.batches = Table("batch", "instance", "request", "position", "tokens", "cached_tokens", "slowest_rank")
        self.preemptions = Table("instance", "flagged_s", "stopped_s", "batch", "victim", "by", "paused")
        self.kv = Table("t_s", "instance", "free_blocks", "suspended_blocks")
        self.steps = Table(
            "batch", "instance", "first_step", "steps", "end_s", "step_s", "growth_s", "decodes", "context_tokens",
            "longest_tokens", "slowest_rank",
        )  # fmt: skip
        self.tokens = Table("request", "instance", "first_step", "last_step")
        self.decisions = 0
        self.scheduler_wall_s = 0.0
        self.events = 0
        self.num_batches = 0
