"""Vidur's profiling tables (`mlp.csv`, `attention.csv`, `all_reduce.csv`, milliseconds) as operator traces.

Reads Vidur's own files (medians of `time_stats.*`) and tables reduced to one `<operator>_ms` column each.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from flowsim.profiler.importers.rows import Origin, check_positive, operator_rows, read_table
from flowsim.profiler.models import Rank

__all__ = ["ELEMENTWISE", "SOFTWARE", "import_vidur", "operator_times"]

SOFTWARE = "vidur profiler"
ELEMENTWISE = {
    "embedding": "emb",
    "residual_add": "add",
    "input_norm": "input_layernorm",
    "rope": "attn_rope",
    "post_attention_residual_add": "add",
    "post_attention_norm": "post_attention_layernorm",
    "act": "mlp_act",
    "final_norm": "input_layernorm",
}
"""Our operators that are no matrix products, and Vidur's names for them; the final norm has none of its own."""

GEMMS = {
    "qkv_gemm": "attn_pre_proj",
    "o_proj_gemm": "attn_post_proj",
    "gate_up_gemm": "mlp_up_proj",
    "down_gemm": "mlp_down_proj",
}
TP_COLUMNS = ("tp", "num_tensor_parallel_workers")
ATTENTION_COLUMNS = ("num_tensor_parallel_workers", "batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill")


def import_vidur(
    origin: Origin, rank: Rank, *, mlp: Path | None, attention: Path | None, all_reduce: Path | None
) -> pd.DataFrame:
    """The trace of a rank from those of Vidur's files that are given.

    Raises:
        ValueError: no file, a missing column, a TP degree without rows, or a time that is not above 0.
    """
    frames = []
    if mlp is not None:
        for operator, name in {**ELEMENTWISE, **GEMMS}.items():
            times_s = operator_times(mlp, name, origin.tp)
            frames.append(operator_rows(origin, operator, times_s, f"vidur {name}", new_tokens=times_s.index))
    if attention is not None:
        frames.append(_attention(origin, attention))
    if all_reduce is not None and origin.tp > 1:
        frames.append(_all_reduces(origin, rank, all_reduce))
    if not frames:
        raise ValueError("vidur: give at least one of --mlp, --attention and --all-reduce")
    return pd.concat(frames, ignore_index=True)


def operator_times(path: Path, operator: str, tp: int) -> pd.Series:
    """Median seconds by tokens of one operator of an `mlp.csv`, by Vidur's name.

    Raises:
        ValueError: no such column, no rows at this TP degree, or a time that is not above 0.
    """
    table = read_table(path, ["num_tokens"])
    column = _column(table, operator, path)
    tp_column = next((name for name in TP_COLUMNS if name in table.columns), None)
    if tp_column is None:
        raise ValueError(f"{path}: no column {' or '.join(TP_COLUMNS)}; found: {', '.join(table.columns)}")
    rows = table[table[tp_column] == tp]
    if rows.empty:
        degrees = sorted(table[tp_column].unique().tolist())
        raise ValueError(f"{path}: column {tp_column} has no rows with {tp}; found: {degrees}")
    check_positive(table, column, str(path))
    return rows.groupby("num_tokens")[column].median().sort_index() / 1e3


def _column(table: pd.DataFrame, operator: str, path: Path) -> str:
    names = (f"{operator}_ms", f"time_stats.{operator}.median")
    found = next((name for name in names if name in table.columns), None)
    if found is None:
        raise ValueError(f"{path}: no column {' or '.join(names)}; found: {', '.join(table.columns)}")
    return found


def _attention(origin: Origin, path: Path) -> pd.DataFrame:
    """Prefill rows of one request as chunks with cached tokens, decode rows as decodes; mixed batches are refused."""
    table = read_table(path, ATTENTION_COLUMNS)
    rows = table[table["num_tensor_parallel_workers"] == origin.tp]
    if rows.empty:
        raise ValueError(f"{path}: column num_tensor_parallel_workers has no rows with {origin.tp}")
    is_prefill = rows["is_prefill"].astype(str).str.lower() == "true"
    mixed = ~is_prefill & (rows["prefill_chunk_size"] > 0)
    if mixed.any():
        line = int(rows.index[mixed][0]) + 2
        raise ValueError(
            f"{path}: line {line}: prefill_chunk_size is above 0 though is_prefill is False: a mixed batch"
        )
    frames = []
    for wanted, name in ((is_prefill, "attn_prefill"), (~is_prefill, "attn_decode")):
        part = rows[wanted]
        if part.empty:
            continue
        column = _column(part, name, path)
        check_positive(part, column, str(path))
        seconds = part[column].to_numpy(dtype=float) / 1e3
        if name == "attn_prefill":
            counts = {
                "new_tokens": part["prefill_chunk_size"],
                "cached_tokens": part["kv_cache_size"],
                "batch": part["batch_size"],
            }
        else:
            counts = {"decodes": part["batch_size"], "decode_kv_tokens": part["kv_cache_size"] + 1}
        frames.append(operator_rows(origin, "attention", seconds, f"vidur {name}", **counts))
    return pd.concat(frames, ignore_index=True)


def _all_reduces(origin: Origin, rank: Rank, path: Path) -> pd.DataFrame:
    """All-reduces of whole tokens over this many GPUs of one node, one row for each of the two of a layer."""
    table = read_table(path, [])
    theirs = {"num_workers": "num_gpus", "devices_per_node": "gpus_per_node", "size": "message_bytes"}
    table = table.rename(columns=theirs)
    for column in theirs.values():
        if column not in table.columns:
            raise ValueError(f"{path}: no column {column}; found: {', '.join(table.columns)}")
    time = "latency_ms" if "latency_ms" in table.columns else _column(table, "all_reduce", path)
    rows = table[(table["num_gpus"] == origin.tp) & (table["gpus_per_node"] == origin.tp)]
    tokens, rest = divmod(rows["message_bytes"], rank.message_bytes_per_token)
    rows, tokens = rows[(rest == 0) & (tokens > 0)], tokens[(rest == 0) & (tokens > 0)]
    if rows.empty:
        raise ValueError(f"{path}: column num_gpus has no whole tokens over {origin.tp} GPUs of one node")
    check_positive(rows, time, str(path))
    return pd.concat(
        [
            operator_rows(origin, name, rows[time] / 1e3, "vidur all_reduce (NCCL)", new_tokens=tokens)
            for name in ("all_reduce_attention", "all_reduce_mlp")
        ],
        ignore_index=True,
    )
