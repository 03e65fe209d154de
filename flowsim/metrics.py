"""Results: tables and summary figures computed from a run's log, saved to and loaded from a folder.

Tables are plain columns of numpy arrays; pandas is imported only when a DataFrame is asked for, or a run is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flowsim import markup
from flowsim.by_class import class_table
from flowsim.core import Outcome, Reason, Request
from flowsim.latency import LatencyModel
from flowsim.load import offered_load
from flowsim.log import Columns, Ended, Log, Table
from flowsim.summary import gpu_words, summarise
from flowsim.tables import is_float, read_table, whole, write_table
from flowsim.tokens import tbt_columns

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Result"]

Array = npt.NDArray[Any]
TABLES = ("requests", "segments", "batches", "preemptions", "kv")
MORE_TABLES = ("steps", "tokens", "transfers", "failures", "migrations")
_KV_COUNTS = ("cached_tokens", "evictions", "recomputed_tokens")


@dataclass(frozen=True, repr=False)
class Result:
    """What one run did.

    `tables` has `requests` (a row per request), `segments`, `batches`, `preemptions` and `kv` as columns;
    the properties of the same names give DataFrames. Runs that decode have `steps` and
    `tokens` besides, those that move KV `transfers`. `run` holds the figures of the run as a whole.
    """

    tables: Mapping[str, Columns]
    run: Mapping[str, Any] = field(default_factory=dict)

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
    ) -> Result:
        """Builds the tables from the log of a run that has ended; `hardware` and `pools` are by the pool's name."""
        latency, first = next(iter(hardware.values())), next(iter(pools.values()))
        tables = {
            "requests": _requests(requests, log.requests, hardware, pools, warmup_s, cooldown_s),
            "segments": _enums(_columns(log.segments), ended=[ended.value for ended in Ended]),
            "batches": _columns(log.batches),
            "preemptions": _columns(log.preemptions),
            "kv": _columns(log.kv),
        }
        tables["preemptions"]["paused"] = tables["preemptions"]["paused"].astype(bool)
        if len(log.steps):
            tables |= {"steps": _columns(log.steps), "tokens": _columns(log.tokens)}
            tables["requests"] |= _decoded(tables, requests, log.requests)
        if len(log.steps) or log.requests.column("cached_tokens").any():
            tables["requests"] |= _counts(log.requests, len(requests), *_KV_COUNTS)
        if len(log.failures):
            tables["failures"] = _columns(log.failures)
            tables["requests"] |= _counts(log.requests, len(requests), "requeued", "recomputed_tokens")
        if len(log.migrations):
            tables["migrations"] = _columns(log.migrations)
            tables["requests"] |= _counts(log.requests, len(requests), "migrations")
        if len(log.transfers):
            tables["transfers"] = _by_start(_columns(log.transfers))
            tables["requests"] |= _transferred(tables["transfers"], len(requests))
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
        }
        return Result(tables, run)

    def __repr__(self) -> str:
        figures = self.summary()
        attained = "no SLOs" if figures["attainment"] is None else f"attainment {figures['attainment']:.2%}"
        return f"Result({figures['requests']} requests, {attained}, {self.run['model']} on {gpu_words(self.run)})"

    def _repr_html_(self) -> str:
        header, rows = class_table(self.tables["requests"], self.summary())
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
        return summarise(self.tables, self.run)

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
        missing = [f for f in [*(f"{name}.csv" for name in TABLES), "run.json"] if not (folder / f).is_file()]
        if missing:
            raise ValueError(f"{folder}: not a run's folder, {', '.join(missing)} missing")
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if "pools" not in run:  # of an older version
            run["pools"] = _one_pool(run)
        if "offered_load" not in run:  # likewise
            run["offered_load"] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["offered_load"]
        there = [*TABLES, *(name for name in MORE_TABLES if (folder / f"{name}.csv").is_file())]
        return Result({name: read_table(folder / f"{name}.csv") for name in there}, run)


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


def _requests(
    requests: Sequence[Request],
    table: Table,
    hardware: Mapping[str, LatencyModel],
    pools: Mapping[str, Mapping[str, Any]],
    warmup_s: float,
    cooldown_s: float,
) -> Columns:
    """The request table: what was asked beside what the log says became of it."""
    n = len(requests)
    logged = table.column("id").astype(np.int64)

    def from_log(name: str) -> npt.NDArray[np.float64]:
        column = np.full(n, math.nan)
        column[logged] = table.column(name)
        return column

    arrival_s = np.array([request.arrival_s for request in requests], dtype=np.float64)
    prompt_tokens = np.array([request.prompt_tokens for request in requests], dtype=np.int64)
    slo_s = np.array([request.ttft_slo_s for request in requests], dtype=np.float64)
    isolated_s, beyond = _alone(prompt_tokens, from_log("prefill_instance"), hardware, pools)
    start_s, first_token_s = from_log("start_s"), from_log("first_token_s")
    ttft_s = first_token_s - arrival_s
    met = (ttft_s <= slo_s).astype(object)
    met[~np.isfinite(slo_s)] = None
    outcome = np.full(n, Outcome.UNFINISHED.value, dtype=object)
    outcome[logged] = _named(table.column("outcome"), [outcome.value for outcome in Outcome])
    reason = np.full(n, None, dtype=object)
    reason[logged] = _named(table.column("reason"), [reason.value for reason in Reason])
    return {
        "id": np.arange(n),
        "arrival_s": arrival_s,
        "start_s": start_s,
        "first_token_s": first_token_s,
        "finish_s": from_log("finish_s"),
        "ttft_s": ttft_s,
        "isolated_s": isolated_s,
        "queued_s": start_s - arrival_s,
        "blocked_s": from_log("blocked_s"),
        "preemptions": np.nan_to_num(from_log("preemptions")).astype(np.int64),
        "suspended_s": from_log("suspended_s"),
        "tbt_max_s": np.full(n, math.nan),
        "met_slo": met,
        "slo_class": np.array([request.slo_class for request in requests], dtype=object),
        "prompt_tokens": prompt_tokens,
        "output_tokens": np.array([request.output_tokens for request in requests], dtype=np.int64),
        "ttft_slo_s": slo_s,
        "tbt_slo_s": np.array([request.tbt_slo_s for request in requests], dtype=np.float64),
        "abandon_s": np.array([request.abandon_s for request in requests], dtype=np.float64),
        "prefill_instance": whole(from_log("prefill_instance")),
        "decode_instance": np.full(n, None, dtype=object),
        "outcome": outcome,
        "reason": reason,
        "extrapolated": beyond,
        **_hashes(requests),
        "measured": (arrival_s >= warmup_s) & (arrival_s <= arrival_s.max(initial=0.0) - cooldown_s),
    }


def _decoded(tables: Mapping[str, Columns], requests: Sequence[Request], log: Table) -> Columns:
    """The columns that a run with decodes adds to the request table, or fills in."""
    finished = tables["requests"]["outcome"] == Outcome.FINISHED.value
    tbt = tbt_columns(tables["steps"], tables["tokens"], tables["requests"]["first_token_s"])
    slo_s = tables["requests"]["tbt_slo_s"]
    met = (finished & ~(tbt["tbt_mean_s"] > slo_s)).astype(object)  # one token keeps nobody waiting for a second
    met[~np.isfinite(slo_s)] = None
    decode_instance = np.full(len(requests), math.nan)
    decode_instance[log.column("id").astype(np.int64)] = log.column("decode_instance")
    return {**tbt, "met_tbt": met, "decode_instance": whole(decode_instance)}


def _counts(log: Table, requests: int, *names: str) -> Columns:
    """Columns of the log with whole numbers, by request."""
    columns = {name: np.zeros(requests, dtype=np.int64) for name in names}
    for name, column in columns.items():
        column[log.column("id").astype(np.int64)] = log.column(name).astype(np.int64)
    return columns


def _by_start(transfers: Columns) -> Columns:
    order = np.lexsort((transfers["request"], transfers["start_s"]))
    ordered = {name: cells[order] for name, cells in transfers.items()}
    return ordered | {"failed": ordered["failed"].astype(bool)}


def _transferred(transfers: Columns, requests: int) -> Columns:
    """When each request's KV was on its way, the last time it was."""
    columns = {name: np.full(requests, math.nan) for name in ("transfer_start_s", "transfer_end_s")}
    arrived = ~transfers["failed"]
    for name, column in columns.items():
        column[transfers["request"][arrived]] = transfers[name.removeprefix("transfer_")][arrived]
    return columns


def _alone(
    prompt_tokens: Array, instance: Array, hardware: Mapping[str, LatencyModel], pools: Mapping[str, Mapping[str, Any]]
) -> tuple[Array, Array]:
    """Of each request, its TTFT alone on an idle instance of the pool it was sent to, and whether it is longer than
    that was measured for."""
    isolated_s, beyond = np.full(len(prompt_tokens), math.nan), np.zeros(len(prompt_tokens), dtype=bool)
    for name, latency in hardware.items():
        first, last = pools[name]["instances"]
        rows = (instance >= first) & (instance <= last)
        lengths, place = np.unique(prompt_tokens[rows], return_inverse=True)
        isolated_s[rows] = np.array([latency.isolated_s(length) for length in lengths.tolist()])[place]
        beyond[rows] = np.array([bool(latency.extrapolated(length)) for length in lengths.tolist()], dtype=bool)[place]
    return isolated_s, beyond


def _hashes(requests: Sequence[Request]) -> Columns:
    """The column `prefix_hashes`, numbers with blanks between them, where any request has some."""
    if not any(request.prefix_hashes for request in requests):
        return {}
    return {"prefix_hashes": np.array([" ".join(map(str, r.prefix_hashes)) or None for r in requests], dtype=object)}


def _columns(table: Table) -> Columns:
    columns = {name: table.column(name) for name in table.columns}
    return {name: cells if is_float(name) else cells.astype(np.int64) for name, cells in columns.items()}


def _enums(columns: Columns, **names: Sequence[str]) -> Columns:
    return {name: _named(cells, names[name]) if name in names else cells for name, cells in columns.items()}


def _named(codes: Array, names: Sequence[str]) -> Array:
    """Positions in a list of names to the names; NaN to None."""
    return np.array([None if code != code else names[int(code)] for code in codes.tolist()], dtype=object)


def _frame(columns: Columns) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(dict(columns))
