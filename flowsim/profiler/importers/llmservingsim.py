"""LLMServingSim's profiles (dense, attention, moe and per_sequence tables, microseconds) as operator traces.

Reads its own files, of one GPU, model and TP degree each, and tables of several joined with such columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from flowsim.profiler.importers.elementwise import LAUNCH_S
from flowsim.profiler.importers.rows import Origin, check_positive, operator_rows, read_table
from flowsim.profiler.models import Rank

__all__ = ["Files", "Link", "import_llmservingsim"]

LAYERS = {
    "embedding": ("embedding",),
    "layernorm": ("input_norm", "post_attention_norm"),
    "qkv_proj": ("qkv_gemm",),
    "qk_norm": ("qk_norm",),
    "rotary_emb": ("rope",),
    "o_proj": ("o_proj_gemm",),
    "gate_up_proj": ("gate_up_gemm",),
    "act_fn": ("act",),
    "down_proj": ("down_gemm",),
    "final_layernorm": ("final_norm",),
}
"""Its dense layers and our operators; its layernorm adds the residual too, and is called twice a layer."""

PER_SEQUENCE = {"lm_head": "lm_head", "sampler": "sampler"}


class Files:
    """The tables to read; `None` for those that are not there."""

    def __init__(
        self, *, dense: Path, attention: Path, moe: Path | None = None, per_sequence: Path | None = None
    ) -> None:
        self.dense, self.attention, self.moe, self.per_sequence = dense, attention, moe, per_sequence


class Link:
    """How ranks meet where no all-reduce was measured: seconds of an empty message, and bytes per second."""

    def __init__(self, latency_s: float = 40.0e-6, bandwidth_bytes_per_s: float = 16.0e9) -> None:
        self.latency_s, self.bandwidth_bytes_per_s = latency_s, bandwidth_bytes_per_s


def import_llmservingsim(
    origin: Origin, rank: Rank, files: Files, *, names: tuple[str, str], link: Link, note: Callable[[str], None]
) -> pd.DataFrame:
    """The trace of one rank; `names` are its own names of GPU and model, for tables that hold several.

    Raises:
        ValueError: a missing column, a layer that is not known, no rows for this GPU, model and TP degree, or a
            time that is not above 0.
    """
    frames = [*_dense(origin, files.dense, names), _attention(origin, files.attention, names)]
    if files.moe is not None:
        frames.append(_moe(origin, files.moe, names))
        note("router: not in the tables on its own; estimated from o_proj")
        frames.append(_router(origin, rank, files.dense, names))
    if files.per_sequence is not None:
        frames.extend(_per_sequence(origin, files.per_sequence, names))
    if rank.tp > 1:
        note("all-reduce: not in the tables; estimated from the link's latency and bandwidth")
        frames.extend(_all_reduces(origin, rank, link))
    return pd.concat(frames, ignore_index=True)


def _rows(path: Path, needed: list[str], origin: Origin, names: tuple[str, str]) -> pd.DataFrame:
    """The rows of this GPU, model and TP degree; the index still counts the file's rows."""
    table = read_table(path, [*needed, "time_us"])
    check_positive(table, "time_us", str(path))
    for column, value in (("gpu", names[0]), ("model", names[1]), ("tp", origin.tp)):
        if column in table.columns:
            found = sorted(table[column].unique().tolist())
            table = table[table[column] == value]
            if table.empty:
                raise ValueError(f"{path}: column {column} has no rows with {value!r} here; found: {found}")
    return table


def _dense(origin: Origin, path: Path, names: tuple[str, str]) -> list[pd.DataFrame]:
    rows = _rows(path, ["layer", "tokens"], origin, names)
    unknown = rows[~rows["layer"].isin(LAYERS)]
    if not unknown.empty:
        line, layer = int(unknown.index[0]) + 2, unknown["layer"].iloc[0]
        raise ValueError(f"{path}: line {line}: layer is {layer!r}; allowed: {', '.join(LAYERS)}")
    return [
        operator_rows(origin, operator, part["time_us"] / 1e6, f"llmservingsim {layer}", new_tokens=part["tokens"])
        for layer, part in rows.groupby("layer", sort=False)
        for operator in LAYERS[str(layer)]
    ]


def _attention(origin: Origin, path: Path, names: tuple[str, str]) -> pd.DataFrame:
    rows = _rows(path, ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"], origin, names)
    return operator_rows(
        origin,
        "attention",
        rows["time_us"] / 1e6,
        "llmservingsim attention",
        new_tokens=rows["prefill_chunk"],
        cached_tokens=rows["kv_prefill"],
        decodes=rows["n_decode"],
        decode_kv_tokens=rows["kv_decode"],
    )


def _moe(origin: Origin, path: Path, names: tuple[str, str]) -> pd.DataFrame:
    rows = _rows(path, ["tokens", "activated_experts"], origin, names)
    counts = {"new_tokens": rows["tokens"], "experts": rows["activated_experts"]}
    return operator_rows(origin, "experts", rows["time_us"] / 1e6, "llmservingsim moe", **counts)


def _router(origin: Origin, rank: Rank, path: Path, names: tuple[str, str]) -> pd.DataFrame:
    """The router as a product of o_proj's rate: a launch, and o_proj's time by the ratio of their weights."""
    rows = _rows(path, ["layer", "tokens"], origin, names)
    rows = rows[rows["layer"] == "o_proj"]
    (router_n, router_k), (o_n, o_k) = rank.gemms["router_gemm"], rank.gemms["o_proj_gemm"]
    seconds = LAUNCH_S + rows["time_us"] / 1e6 * (router_n * router_k) / (o_n * o_k)
    source = f"estimated (o_proj of llmservingsim by the ratio of the weights, plus {1e6 * LAUNCH_S:g} us)"
    return operator_rows(
        replace(origin, statistic="estimate"), "router_gemm", seconds, source, new_tokens=rows["tokens"]
    )


def _per_sequence(origin: Origin, path: Path, names: tuple[str, str]) -> list[pd.DataFrame]:
    rows = _rows(path, ["layer", "sequences"], origin, names)
    unknown = rows[~rows["layer"].isin(PER_SEQUENCE)]
    if not unknown.empty:
        line, layer = int(unknown.index[0]) + 2, unknown["layer"].iloc[0]
        raise ValueError(f"{path}: line {line}: layer is {layer!r}; allowed: {', '.join(PER_SEQUENCE)}")
    return [
        operator_rows(
            origin,
            PER_SEQUENCE[str(layer)],
            part["time_us"] / 1e6,
            f"llmservingsim {layer}",
            sequences=part["sequences"],
        )
        for layer, part in rows.groupby("layer", sort=False)
    ]


def _all_reduces(origin: Origin, rank: Rank, link: Link) -> list[pd.DataFrame]:
    tokens = 2 ** np.arange(14)
    seconds = link.latency_s + tokens * rank.message_bytes_per_token / link.bandwidth_bytes_per_s
    source = (
        f"estimated ({1e6 * link.latency_s:g} us plus the message over {link.bandwidth_bytes_per_s / 1e9:g} GB/s: "
        "the link that fits the published TP 2 run over PCIe)"
    )
    origin = replace(origin, statistic="estimate")
    names = ("all_reduce_attention", "all_reduce_mlp")
    return [operator_rows(origin, name, seconds, source, new_tokens=tokens) for name in names]
