"""Results: the tables and the summary of a run, saved to and loaded from a folder.

Tables are plain columns of numpy arrays; pandas is imported only when a DataFrame is asked for.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flowsim import markup
from flowsim.by_class import CLASS_HEADER, class_rows
from flowsim.core import Request
from flowsim.keep import ALL, KEPT, Keeper, KeptTables
from flowsim.latency import LatencyModel
from flowsim.log import Columns, Log, is_float
from flowsim.summary import summarise
from flowsim.tables import event_tables, request_tables
from flowsim.totals import Totals

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Result"]

Array = npt.NDArray[Any]
MORE_TABLES = ("steps", "tokens", "transfers", "failures")
_TEXT = {"prefix_hashes", "slo_class", "outcome", "reason", "ended"}
_BOOLS = {"paused", "extrapolated", "measured"}
_OBJECTS: dict[str, Callable[[str], Any]] = {
    "met_slo": lambda cell: cell == "True",
    "met_tbt": lambda cell: cell == "True",
    "prefill_instance": int,
    "decode_instance": int,
}


@dataclass(frozen=True, repr=False)
class Result:
    """What one run did.

    `tables` has `requests` (a row per request), `segments`, `batches`, `preemptions` and `kv` as columns;
    the properties of the same names give DataFrames. Runs that decode have `steps` and
    `tokens` besides, those that move KV `transfers`. `run` holds the figures of the run as a whole. A run that kept
    fewer tables (`keep` of `simulate`) has those, and its summary in `figures`; a ValueError says of any other table
    what to run with.
    """

    tables: Mapping[str, Columns]
    run: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, Any] | None = None

    @staticmethod
    def of(
        requests: Sequence[Request],
        log: Log,
        hardware: Mapping[str, LatencyModel],
        *,
        pools: Mapping[str, Mapping[str, Any]],
        kv_blocks: Sequence[int],
        link: Mapping[str, float],
        seed: int,
        after_horizon: int,
        warmup_s: float,
        cooldown_s: float,
        partial: bool,
        simulation_wall_s: float,
        keeper: Keeper,
    ) -> Result:
        """Builds the tables from the log of a run that has ended; `hardware` and `pools` are by the pool's name."""
        latency, first = next(iter(hardware.values())), next(iter(pools.values()))
        log.pack()
        tables = request_tables(requests, log, hardware, pools, warmup_s, cooldown_s)
        run = {
            "model": latency.profile.model,
            "gpu": latency.profile.gpu,
            "tp": latency.tp,
            "stops": latency.stops.value,
            "pass_tokens": latency.pass_tokens,
            "instances": len(kv_blocks),
            "kv_blocks": list(kv_blocks),
            "idles": first["idles"],
            "pools": {name: dict(pool) for name, pool in pools.items()},
            **({"link": dict(link)} if len(log.transfers) else {}),
            "seed": seed,
            "after_horizon": after_horizon,
            "warmup_s": warmup_s,
            "cooldown_s": cooldown_s,
            "partial": partial,
            "request_s": latency.profile.request_s,
            "decisions": log.decisions,
            "scheduler_wall_s": log.scheduler_wall_s,
            "events": log.events,
            "simulation_wall_s": simulation_wall_s,
            "keep": keeper.keep,
        }
        if keeper.keep == ALL:
            return Result(tables | event_tables(log), run)
        figures = summarise(tables, keeper.totals, run)
        return Result(keeper.tables(tables | event_tables(log)), run, figures)

    def __repr__(self) -> str:
        figures = self.summary()
        attained = "no SLOs" if figures["attainment"] is None else f"attainment {figures['attainment']:.2%}"
        run = self.run
        return f"Result({figures['requests']} requests, {attained}, {run['model']} on {figures['gpus']} x {run['gpu']})"

    def _repr_html_(self) -> str:
        return markup.table(repr(self), class_rows(self.summary()), CLASS_HEADER)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """A row per request, in order of arrival; `docs/results.md` describes each column."""
        return _frame(self.tables["requests"])

    @cached_property
    def segments(self) -> pd.DataFrame:
        """A row per uninterrupted stretch of one batch on an instance: operators `first_op` up to `last_op`."""
        return _frame(self.tables["segments"])

    @cached_property
    def batches(self) -> pd.DataFrame:
        """A row per member of each batch."""
        return _frame(self.tables["batches"])

    @cached_property
    def preemptions(self) -> pd.DataFrame:
        """A row per flag raised: `victim` and `by` are the requests at the heads, `batch` the one flagged."""
        return _frame(self.tables["preemptions"])

    @cached_property
    def kv(self) -> pd.DataFrame:
        """KV blocks free, and held by suspended batches, at each change."""
        return _frame(self.tables["kv"])

    @property
    def decisions(self) -> dict[str, float]:
        """How often policies were asked, and the real seconds that took."""
        return {"count": self.run["decisions"], "wall_s": self.run["scheduler_wall_s"]}

    def summary(self) -> dict[str, Any]:
        """The figures of `summary.json`: attainment, TTFT, preemptions and more (README lists the keys)."""
        if self.figures is not None:
            return dict(self.figures)
        return summarise(self.tables, Totals.of(self.tables), self.run)

    def save(self, folder: str | Path) -> Path:
        """Writes every table as CSV, `run.json` and `summary.json`; returns the folder.

        `requests.csv` can be replayed as a trace. Floats are written so that they read back exactly.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in self.tables.items():
            _write(folder / f"{name}.csv", table)
        for name, content in (("run", dict(self.run)), ("summary", self.summary())):
            (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return folder

    @staticmethod
    def load(folder: str | Path) -> Result:
        """Reads what `save` wrote.

        Raises:
            ValueError: the folder lacks one of the files.
        """
        folder = Path(folder)
        run = _json(folder, "run")
        keep = run.get("keep", ALL)  # not in the runs of older versions
        _check_there(folder, [f"{name}.csv" for name in KEPT[keep]])
        if "pools" not in run:
            run["pools"] = _one_pool(run)
        if keep != ALL:
            tables = {name: _read(folder / f"{name}.csv") for name in KEPT[keep]}
            return Result(KeptTables(tables, keep), run, _json(folder, "summary"))
        there = [*KEPT[ALL], *(name for name in MORE_TABLES if (folder / f"{name}.csv").is_file())]
        return Result({name: _read(folder / f"{name}.csv") for name in there}, run)


def _json(folder: Path, name: str) -> dict[str, Any]:
    """One of the files of a run beside its tables."""
    _check_there(folder, [f"{name}.json"])
    content: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return content


def _check_there(folder: Path, files: Sequence[str]) -> None:
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise ValueError(f"{folder}: not a run's folder, {', '.join(missing)} missing")


def _one_pool(run: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The pools of a run from before clusters had several."""
    keys = ("gpu", "tp", "stops", "pass_tokens", "request_s", "idles")
    return {"prefill": {"instances": [0, run["instances"] - 1], "decode": None, **{key: run[key] for key in keys}}}


def _frame(columns: Columns) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(dict(columns))


def _write(path: Path, columns: Columns) -> None:
    cells = [["" if cell is None or cell != cell else cell for cell in column.tolist()] for column in columns.values()]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*cells, strict=True))


def _read(path: Path) -> Columns:
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        names = next(rows)
        cells = list(zip(*rows, strict=True)) or [()] * len(names)
    return {name: _parsed(name, column) for name, column in zip(names, cells, strict=True)}


def _parsed(name: str, cells: Sequence[str]) -> Array:
    """A column's cells as numbers, or as objects where it holds text or may hold None."""
    if name in _TEXT:
        return np.array([cell or None for cell in cells], dtype=object)
    if name in _OBJECTS:
        return np.array([_OBJECTS[name](cell) if cell else None for cell in cells], dtype=object)
    if name in _BOOLS:
        return np.array([cell == "True" for cell in cells], dtype=bool)
    if is_float(name):
        return np.array([float(cell) if cell else math.nan for cell in cells], dtype=np.float64)
    return np.array([int(cell) for cell in cells], dtype=np.int64)
