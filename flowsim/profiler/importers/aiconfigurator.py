"""Any transformer composed, operator by operator, from the measured kernels of the `aiconfigurator-core` package.

What the tables lack is estimated or interpolated, said in the rows' `source` and returned as notes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from flowsim.profiler.importers import elementwise
from flowsim.profiler.importers.perf_tables import CUSTOM_ALL_REDUCE_BYTES, PerfTables
from flowsim.profiler.importers.rows import Origin, operator_rows
from flowsim.profiler.models import Gpu, Rank

__all__ = ["Choices", "import_aiconfigurator"]

Note = Callable[[str], None]

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


def import_aiconfigurator(tables: PerfTables, rank: Rank, gpu: Gpu, choices: Choices, note: Note) -> pd.DataFrame:
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
        frames.extend(_all_reduces(origin, tables, rank, choices, note))
    if choices.elementwise is not None and choices.measured is not None:
        frames.append(elementwise.from_vidur(origin, rank, choices.elementwise, choices.measured))
    else:
        note("norms, rope, activation, adds, embedding: not in the tables; estimated from memory bandwidth")
        frames.append(elementwise.estimated(origin, rank, gpu))
    return pd.concat(frames, ignore_index=True)


def _gemms(origin: Origin, tables: PerfTables, rank: Rank, note: Note) -> list[pd.DataFrame]:
    frames = []
    for operator, (n, k) in rank.gemms.items():
        times_s, composed = tables.gemm(n, k)
        if composed:
            note(f"{operator}: not on the grid; {composed}")
        source = _source(f"gemm {tables.read['gemm']}", composed)
        frames.append(operator_rows(origin, operator, times_s, source, new_tokens=times_s.index))
    return frames


def _attention(origin: Origin, tables: PerfTables, rank: Rank, note: Note) -> pd.DataFrame:
    times, between = tables.attention(rank.q_heads, rank.kv_heads, rank.shapes.head_dim)
    note("attention: no cached-prefix axis in the tables; whole prompts only")
    if between:
        note(f"attention: not on the grid; {between}")
    source = _source(f"context attention {tables.read['attention']}", between)
    counts = {"new_tokens": times["isl"], "batch": times["batch_size"]}
    return operator_rows(origin, "attention", times["seconds"], source, **counts)


def _decode_attention(origin: Origin, tables: PerfTables, rank: Rank, gpu: Gpu, note: Note) -> pd.DataFrame:
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


def _all_reduces(origin: Origin, tables: PerfTables, rank: Rank, choices: Choices, note: Note) -> list[pd.DataFrame]:
    times_s = tables.all_reduce(rank.tp, choices.all_reduce)
    tokens, latency_s, is_between = _in_whole_tokens(times_s, rank.message_bytes_per_token)
    remark = "between measured message sizes" if is_between else ""
    if remark:
        note(f"all-reduce: a token is {rank.message_bytes_per_token} bytes; {remark}")
    below = f"custom, {choices.all_reduce}, below 8 MiB"
    source = _source(f"all-reduce {tables.read['comm']} {below}; {tables.read['nccl']} from there", remark)
    names = ("all_reduce_attention", "all_reduce_mlp")
    return [operator_rows(origin, name, latency_s, source, new_tokens=tokens) for name in names]


def _in_whole_tokens(times_s: pd.Series, token_bytes: int) -> tuple[list[int], list[float], bool]:
    """Tokens, seconds, and whether any lies between measured sizes: one for each size of a token and more.

    A size that is no whole number of tokens gives the next whole one (the largest size the one before), on the line
    between its two measured neighbours of the same library.
    """
    tokens: dict[int, float] = {}
    is_between = False
    sizes = times_s.index.to_numpy(dtype=float)
    for part in (times_s[sizes < CUSTOM_ALL_REDUCE_BYTES], times_s[sizes >= CUSTOM_ALL_REDUCE_BYTES]):
        measured = part.index.to_numpy(dtype=float)
        for size in measured:
            over = math.ceil(size / token_bytes)
            count = over if over * token_bytes <= measured[-1] else over - 1
            wanted = count * token_bytes
            if size >= token_bytes and wanted >= measured[0]:
                tokens[count] = float(np.interp(wanted, measured, part.to_numpy(dtype=float)))
                is_between = is_between or wanted != size
    return list(tokens), list(tokens.values()), is_between


def _source(table: str, remark: str = "") -> str:
    return f"aiconfigurator {table}" + (f" ({remark})" if remark else "")
