"""Results: the tables and the summary of a run, saved to and loaded from a folder.

Tables are plain columns of numpy arrays; pandas is imported only when a DataFrame is asked for, or a run is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowsim import markup
from flowsim.by_class import class_table
from flowsim.core import Request
from flowsim.keep import ALL, KEPT, Keeper, KeptTables
from flowsim.latency import LatencyModel
from flowsim.load import offered_load
from flowsim.log import Columns, Log
from flowsim.summary import gpu_words, summarise
from flowsim.tables import read_table, write_table
from flowsim.tabulate import event_tables, request_tables
from flowsim.totals import Totals

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Result"]

MORE_TABLES = ("steps", "tokens", "layers", "stops", "transfers", "failures", "migrations")


@dataclass(frozen=True, repr=False)
class Result:
    """What one run did.

    `tables` has `requests` (a row per request), `segments`, `batches`, `preemptions` and `kv` as columns;
    the properties of the same names give DataFrames. Runs that decode have `steps` and `tokens` besides, those that
    move KV `transfers`, layered prefills `layers`. `run` holds the figures of the run as a whole. A run that kept
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
            "offered_load": offered_load(requests, _prefilling(hardware, pools)),
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
        every = {"requests": tables["requests"], **event_tables(log), **tables}
        if keeper.keep == ALL:
            return Result(every, run)
        return Result(keeper.tables(every), run, summarise(every, keeper.totals, run))

    def __repr__(self) -> str:
        figures = self.summary()
        attained = "no SLOs" if figures["attainment"] is None else f"attainment {figures['attainment']:.2%}"
        return f"Result({figures['requests']} requests, {attained}, {self.run['model']} on {gpu_words(self.run)})"

    def _repr_html_(self) -> str:
        header, rows = class_table(self.summary())
        return markup.table(repr(self), rows, header)

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
            write_table(folder / f"{name}.csv", table)
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
        ran = (folder / "run.json").is_file()
        keep = _json(folder, "run").get("keep", ALL) if ran else ALL  # not in the runs of older versions
        missing = [f for f in [*(f"{name}.csv" for name in KEPT[keep]), "run.json"] if not (folder / f).is_file()]
        if missing:
            raise ValueError(f"{folder}: not a run's folder, {', '.join(missing)} missing")
        run = _json(folder, "run")
        if "pools" not in run:  # of an older version
            run["pools"] = _one_pool(run)
        if "offered_load" not in run:  # likewise
            run["offered_load"] = _json(folder, "summary")["offered_load"]
        if keep != ALL:
            tables = {name: read_table(folder / f"{name}.csv") for name in KEPT[keep]}
            return Result(KeptTables(tables, keep), run, _json(folder, "summary"))
        there = [*KEPT[ALL], *(name for name in MORE_TABLES if (folder / f"{name}.csv").is_file())]
        return Result({name: read_table(folder / f"{name}.csv") for name in there}, run)


def _json(folder: Path, name: str) -> dict[str, Any]:
    """One of the files of a run beside its tables."""
    path = folder / f"{name}.json"
    if not path.is_file():
        raise ValueError(f"{folder}: not a run's folder, {path.name} missing")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _one_pool(run: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The pools of a run from before clusters had several."""
    keys = ("gpu", "tp", "stops", "pass_tokens", "request_s", "idles")
    return {"prefill": {"instances": [0, run["instances"] - 1], "decode": None, **{key: run[key] for key in keys}}}


def _prefilling(
    hardware: Mapping[str, LatencyModel], pools: Mapping[str, Mapping[str, Any]]
) -> list[tuple[int, LatencyModel]]:
    """How many instances of each kind of hardware requests are sent to."""
    decoding = {pool["decode"] for pool in pools.values()}
    spans = {name: pool["instances"] for name, pool in pools.items() if name not in decoding}
    return [(last - first + 1, hardware[name]) for name, (first, last) in spans.items()]


def _frame(columns: Columns) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(dict(columns))
