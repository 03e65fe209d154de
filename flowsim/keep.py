"""What a result keeps of a run: every table, or fewer, with figures that are added up while the run goes on."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flowsim.log import Cells, Columns, Log, Table
from flowsim.names import unknown
from flowsim.totals import Totals

__all__ = ["ALL", "KEPT", "SAMPLED", "Keeper", "KeptTables", "check_keep", "need_all"]

ALL = "all"
KEPT: dict[str, tuple[str, ...]] = {
    ALL: ("requests", "segments", "batches", "preemptions", "kv"),
    "requests": ("requests",),
    "sample": ("sample_requests", "sample_batches", "sample_segments"),
    "summary": (),
}
"""What can be kept, and the tables that each keeps; the figures of the summary are those of all requests with each."""
SAMPLED = 1000
"""Requests of a sample."""


class KeptTables(dict[str, Columns]):
    """The tables that a run kept, by name; one that it did not keep is asked for with an error."""

    def __init__(self, tables: Mapping[str, Columns], keep: str) -> None:
        super().__init__(tables)
        self.keep = keep

    def __missing__(self, name: str) -> Columns:
        alone = [f", or alone with keep={keep}" for keep, names in KEPT.items() if name in names and keep != ALL]
        raise ValueError(
            f"the run was made with keep={self.keep}, which keeps {', '.join(self) or 'no table'}; "
            f"{name!r} is kept with keep=all{''.join(alone)}"
        )


class Keeper:
    """Stands at a log and keeps of what is packed there what was asked for; the rest is added up and let go.

    Args:
        log: of a run that has not begun.
        keep: a key of `KEPT`.
        requests: how many requests there are to sample from.
        seed: of the sample; the same requests whatever the policy.

    Raises:
        ValueError: nothing of that name can be kept.
    """

    def __init__(self, log: Log, keep: str, requests: int, seed: int) -> None:
        check_keep(keep)
        self.keep = keep
        self.totals = Totals()
        self.sample = np.zeros(0, dtype=np.int64)
        if keep == ALL:
            return
        if keep == "sample":
            drawn = random.Random(seed).sample(range(requests), min(SAMPLED, requests))
            self.sample = np.array(sorted(drawn), dtype=np.int64)
        self._batches: set[float] = set()
        log.segments.kept = _adding(log.segments, self.totals.add_segments, self._of_sampled_batches)
        log.batches.kept = _adding(log.batches, self.totals.add_batches, self._of_sampled_requests)
        log.preemptions.kept = _adding(log.preemptions, self.totals.add_preemptions, _none)
        log.kv.kept = log.layers.kept = log.stops.kept = lambda cells: cells[:0]

    def tables(self, made: Mapping[str, Columns]) -> KeptTables:
        """Of the tables of a run those that are kept; the sampled requests are taken out of `requests`."""
        if self.keep == "sample":
            requests = made["requests"]
            rows = self.sample[self.sample < len(requests["id"])]  # those after the horizon never arrived
            made = {f"sample_{name}": table for name, table in made.items()}
            made["sample_requests"] = {name: cells[rows] for name, cells in requests.items()}
        return KeptTables({name: made[name] for name in KEPT[self.keep]}, self.keep)

    def _of_sampled_requests(self, rows: Columns) -> npt.NDArray[np.bool_]:
        """Members of batches; those of the sample are noted for their segments, which are logged later."""
        chosen = np.isin(rows["request"], self.sample)
        self._batches.update(rows["batch"][chosen].tolist())
        return chosen

    def _of_sampled_batches(self, rows: Columns) -> npt.NDArray[np.bool_]:
        return np.array([batch in self._batches for batch in rows["batch"].tolist()], dtype=bool)


def check_keep(keep: str) -> None:
    """Refuses what cannot be kept.

    Raises:
        ValueError: with near names and what can.
    """
    if keep not in KEPT:
        raise ValueError(unknown("keep", keep, KEPT))


def need_all(keep: str, what: str, instead: str = "") -> None:
    """Refuses, before anything runs, what needs every table of a run that does not keep them; `instead` says what else
    to ask for.

    Raises:
        ValueError: with what to ask for.
    """
    if keep != ALL:
        raise ValueError(
            f"{what} needs every table of the run, and keep={keep} does not keep them; give keep=all{instead}"
        )


def _adding(
    table: Table, add: Callable[[Columns], None], chosen: Callable[[Columns], npt.NDArray[np.bool_]]
) -> Callable[[Cells], Cells]:
    """Adds a table's rows up as they are packed, and keeps those chosen."""

    def kept(cells: Cells) -> Cells:
        rows: dict[str, npt.NDArray[Any]] = dict(zip(table.columns, cells.T, strict=True))
        add(rows)
        return cells[chosen(rows)]

    return kept


def _none(rows: Columns) -> npt.NDArray[np.bool_]:
    return np.zeros(len(rows["batch"]), dtype=bool)
