"""The tables of a run that has ended, built from its log: what was asked beside what became of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flowsim.core import Outcome, Reason, Request
from flowsim.latency import LatencyModel
from flowsim.log import Columns, Ended, Log, Table
from flowsim.tables import is_float, whole
from flowsim.timeline import Stops
from flowsim.tokens import tbt_columns

__all__ = ["event_tables", "request_tables"]

Array = npt.NDArray[Any]
_KV_COUNTS = ("cached_tokens", "evictions", "recomputed_tokens")


def request_tables(
    requests: Sequence[Request],
    log: Log,
    hardware: Mapping[str, LatencyModel],
    pools: Mapping[str, Mapping[str, Any]],
    warmup_s: float,
    cooldown_s: float,
) -> dict[str, Columns]:
    """`requests`, and those of `steps`, `tokens`, `layers`, `stops`, `failures`, `migrations` and `transfers` that
    there are."""
    tables = {"requests": _requests(requests, log.requests, hardware, pools, warmup_s, cooldown_s)}
    if len(log.steps):
        tables |= {"steps": _columns(log.steps), "tokens": _columns(log.tokens)}
        tables["requests"] |= _decoded(tables, requests, log.requests)
    if len(log.steps) or log.requests.column("cached_tokens").any():
        tables["requests"] |= _counts(log.requests, len(requests), *_KV_COUNTS)
    if len(log.layers):
        tables["layers"] = _columns(log.layers)
    if len(log.stops):
        tables["stops"] = _enums(_columns(log.stops), stops=[stops.value for stops in Stops])
    if len(log.failures):
        tables["failures"] = _columns(log.failures)
        tables["requests"] |= _counts(log.requests, len(requests), "requeued", "recomputed_tokens")
    if len(log.migrations):
        tables["migrations"] = _columns(log.migrations)
        tables["requests"] |= _counts(log.requests, len(requests), "migrations")
    if len(log.transfers):
        tables["transfers"] = _by_start(_columns(log.transfers))
        tables["requests"] |= _transferred(tables["transfers"], len(requests))
    return tables


def event_tables(log: Log) -> dict[str, Columns]:
    """`segments`, `batches`, `preemptions` and `kv`, as far as the log has kept their rows."""
    tables = {
        "segments": _enums(_columns(log.segments), ended=[ended.value for ended in Ended]),
        "batches": _columns(log.batches),
        "preemptions": _columns(log.preemptions),
        "kv": _columns(log.kv),
    }
    tables["preemptions"]["paused"] = tables["preemptions"]["paused"].astype(bool)
    return tables


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
    named = np.array([*names, None], dtype=object)
    return named[np.where(np.isnan(codes), len(names), codes).astype(np.int64)]
