"""Any transformer composed, operator by operator, from the measured kernels of the `aiconfigurator-core` package.

What the tables lack is estimated or interpolated, said in the rows' `source` and returned as notes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from flowsim.profiler.importers import elementwise
from flowsim.profiler.importers.perf_tables import PerfTables
from flowsim.profiler.importers.rows import Origin, operator_rows
from flowsim.profiler.models import Gpu, Rank

__all__ = ["Choices", "import_aiconfigurator"]

ROUTING = "power_law_1.01"
"""How unevenly tokens fall on experts: the mildest skew that the tables of every system have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the tables leave open.

    `all_reduce` is eager or graph; `elementwise` is an optional table of Vidur's and `measured` the rank it was
    measured on.
    """

    all_reduce: str = "eager"
    routing: str = ROUTING
    elementwise: Path | None = None
    measured: Rank | None = None


def import_aiconfigurator(
    tables: PerfTables, rank: Rank, gpu: Gpu, choices: Choices, note: Callable[[str], None]
) -> pd.DataFrame:
    """The trace of one rank; `note` is told of every gap that was filled.

    Raises:
        ValueError: no tables for this system or backend, or a shape outside their grids.
    """
    origin = Origin(
        model=rank.shapes.name,
        gpu=gpu.name,
        tp=rank.tp,
        statistic="mean",
        software=f"{tables.package}, {tables.system}",
    )
    frames = [
        *_gemms(origin, tables, rank, note),
        _attention(origin, tables, rank, note),
        _decode_attention(origin, tables, rank, gpu, note),
    ]
    if rank.shapes.experts:
        frames.append(_experts(origin, tables, rank, choices.routing))
    if rank.tp > 1:
        frames.extend(_all_reduces(origin, tables, rank, choices.all_reduce))
    if choices.elementwise is not None and choices.measured is not None:
        frames.append(elementwise.from_vidur(origin, rank, choices.elementwise, choices.measured))
    else:
        note("norms, rope, activation, adds, embedding: not in the tables; estimated from memory bandwidth")
        frames.append(elementwise.estimated(origin, rank, gpu))
    return pd.concat(frames, ignore_index=True)


def _gemms(origin: Origin, tables: PerfTables, rank: Rank, note: Callable[[str], None]) -> list[pd.DataFrame]:
    frames = []
    for operator, (n, k) in rank.gemms.items():
        times_s, composed = tables.gemm(n, k)
        if composed:
            note(f"{operator}: not on the grid; {composed}")
        source = _source(f"gemm {tables.read['gemm']}", composed)
        frames.append(operator_rows(origin, operator, times_s, source, new_tokens=times_s.index))
    return frames


def _attention(origin: Origin, tables: PerfTables, rank: Rank, note: Callable[[str], None]) -> pd.DataFrame:
    times, between = tables.attention(rank.q_heads, rank.kv_heads, rank.shapes.head_dim)
    note("attention: no cached-prefix axis in the tables; whole prompts only")
    if between:
        note(f"attention: not on the grid; {between}")
    source = _source(f"context attention {tables.read['attention']}", between)
    counts = {"new_tokens": times["isl"], "batch": times["batch_size"]}
    return operator_rows(origin, "attention", times["seconds"], source, **counts)


def _decode_attention(
    origin: Origin, tables: PerfTables, rank: Rank, gpu: Gpu, note: Callable[[str], None]
) -> pd.DataFrame:
    try:
        times, between = tables.decode_attention(rank.q_heads, rank.kv_heads, rank.shapes.head_dim)
    except ValueError as error:
        note(f"decode attention: {error}; estimated as KV bytes over memory bandwidth")
        return _estimated_decode(origin, rank, gpu)
    if between:
        note(f"decode attention: not on the grid; {between}")
    source = _source(f"generation attention {tables.read['attention']}", between)
    counts = {"decodes": times["batch_size"], "decode_kv_tokens": times["kv_tokens"]}
    return operator_rows(origin, "attention", times["seconds"], source, **counts)


def _estimated_decode(origin: Origin, rank: Rank, gpu: Gpu) -> pd.DataFrame:
    decodes, kv_tokens = (grid.ravel() for grid in np.meshgrid(2 ** np.arange(9), 2 ** np.arange(4, 16)))
    moved = decodes * kv_tokens * rank.kv_bytes_per_token
    seconds = elementwise.LAUNCH_S + moved / (elementwise.BANDWIDTH_SHARE * gpu.bandwidth_bytes_per_s)
    source = f"estimated (KV bytes over {elementwise.BANDWIDTH_SHARE:g} of the memory bandwidth)"
    return operator_rows(origin, "attention", seconds, source, decodes=decodes, decode_kv_tokens=kv_tokens)


def _experts(origin: Origin, tables: PerfTables, rank: Rank, routing: str) -> pd.DataFrame:
    shapes = rank.shapes
    times_s = tables.experts(
        shapes.hidden_size,
        shapes.expert_intermediate_size,
        shapes.experts_per_token,
        shapes.experts,
        rank.tp,
        routing,
    )
    source = _source(f"moe {tables.read['moe']}", f"routing {routing}")
    return operator_rows(origin, "experts", times_s, source, new_tokens=times_s.index)


def _all_reduces(origin: Origin, tables: PerfTables, rank: Rank, mode: str) -> list[pd.DataFrame]:
    times_s = tables.all_reduce(rank.tp, mode)
    times_s = times_s[times_s.index % rank.message_bytes_per_token == 0]
    tokens = times_s.index // rank.message_bytes_per_token
    source = _source(f"all-reduce {tables.read['comm']} custom, {mode}, below 8 MiB; {tables.read['nccl']} from there")
    names = ("all_reduce_attention", "all_reduce_mlp")
    return [operator_rows(origin, name, times_s, source, new_tokens=tokens) for name in names]


def _source(table: str, remark: str = "") -> str:
    return f"aiconfigurator {table}" + (f" ({remark})" if remark else "")
