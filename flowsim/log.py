"""What happened in a run, written down as it happens: tables of numbers, one row at a time, packed now and then.

Only the executor writes here; `flowsim.metrics` turns the tables into results afterwards.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Cells", "Columns", "Ended", "Log", "Table"]

Columns = dict[str, npt.NDArray[Any]]
"""A table read: column names to arrays of one length."""

Cells = npt.NDArray[np.float64]
"""Rows packed: a row each, a number for each column."""


class Ended(enum.Enum):
    """How a segment ended. `PASS`: the batch ended, but some of its prompts have tokens left. `CUT`: by the horizon."""

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is a call

    FINISHED = "finished"
    PAUSED = "paused"
    PASS = "pass"
    FAILED = "failed"
    CUT = "cut"


class Table:
    """Rows of numbers under named columns.

    `add` appends a row, a tuple with a number for each column, as 8 bytes a column: a tenth of what its objects would
    take. `pack` turns what was added since into an array.
    `kept` is given each array, and answers those of its rows that the table is to keep: all, if nobody replaces it.
    """

    __slots__ = ("_blocks", "_packed", "_rows", "add", "columns", "kept")

    def __init__(self, *columns: str) -> None:
        self.columns = columns
        self.kept: Callable[[Cells], Cells] = _all
        self._blocks = [np.empty((0, len(columns)))]
        self._packed = 0
        self._rows: list[bytes] = []
        cells, append = Struct(f"{len(columns)}d").pack, self._rows.append
        self.add: Callable[[tuple[float, ...]], None] = lambda row: append(cells(*row))

    def __len__(self) -> int:
        """Rows added, whether kept or not."""
        return self._packed + len(self._rows)

    def pack(self) -> None:
        """Packs the rows added since the last time."""
        if not self._rows:
            return
        cells = np.frombuffer(b"".join(self._rows)).reshape(-1, len(self.columns))
        self._blocks.append(self.kept(cells))
        self._packed += len(self._rows)
        self._rows.clear()

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """One column as an array of its own."""
        self.pack()
        place = self.columns.index(name)
        return np.concatenate([block[:, place] for block in self._blocks])


def _all(cells: Cells) -> Cells:
    return cells


class Log:
    """The tables of one run. Enum columns hold the member's position in its class."""

    def __init__(self) -> None:
        self.requests = Table(
            "id", "start_s", "first_token_s", "finish_s", "blocked_s", "preemptions", "suspended_s",
            "prefill_instance", "outcome", "reason", "decode_instance", "cached_tokens", "evictions",
            "recomputed_tokens", "requeued", "migrations",
        )  # fmt: skip
        self.segments = Table(
            "instance", "batch", "start_s", "end_s", "first_op", "last_op", "tokens", "ended", "switch_s", "barrier_s"
        )
        self.batches = Table("batch", "instance", "request", "position", "tokens", "cached_tokens", "slowest_rank")
        self.stops = Table("batch", "instance", "stops")
        self.layers = Table("batch", "instance", "first_layer", "last_layer", "layers")
        self.preemptions = Table("instance", "flagged_s", "stopped_s", "batch", "victim", "by", "paused")
        self.kv = Table("t_s", "instance", "free_blocks", "suspended_blocks")
        self.steps = Table(
            "batch", "instance", "first_step", "steps", "end_s", "step_s", "growth_s", "decodes", "context_tokens",
            "longest_tokens", "slowest_rank",
        )  # fmt: skip
        self.tokens = Table("request", "instance", "first_step", "last_step")
        self.transfers = Table("request", "source", "target", "bytes", "asked_s", "start_s", "end_s", "failed")
        self.failures = Table("instance", "at_s", "until_s")
        self.migrations = Table("request", "source", "target", "at_s")
        self.decisions = 0
        self.scheduler_wall_s = 0.0
        self.events = 0
        self.num_batches = 0
        self._steps: dict[int, int] = {}  # by instance: those that gave tokens so far

    def steps_of(self, instance: int, count: int) -> int:
        """Numbers the next `count` steps of an instance that give tokens, and answers the first one's."""
        first = self._steps.get(instance, 0)
        self._steps[instance] = first + count
        return first

    def pack(self) -> None:
        """Packs what the tables hold, so that a long run stays small; batches before the segments that they run in."""
        often = (self.requests, self.batches, self.layers, self.stops, self.segments, self.preemptions, self.kv)
        for table in (*often, self.steps, self.tokens):
            table.pack()
