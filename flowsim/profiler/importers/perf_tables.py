"""The measured tables of the `aiconfigurator-core` package, and their values between the points of their grids.

Knows the package's files, columns and gaps; knows nothing of models. Times are seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata, util
from itertools import pairwise
from pathlib import Path

import pandas as pd

from flowsim.names import unknown
from flowsim.profiler.importers.rows import check_positive, require

__all__ = ["CUSTOM_ALL_REDUCE_BYTES", "PerfTables"]

CUSTOM_ALL_REDUCE_BYTES = 8 * 2**20
"""vLLM takes its custom all-reduce for messages below this and NCCL from there on; the tables' custom rows from
here on are that fallback, in eager mode with a copy of the message more."""

GAP = 2.0  # a grid that steps by more than this factor is not interpolated inside the step
Weights = list[tuple[float, int]]


@dataclass(slots=True)
class PerfTables:
    """One system's tables of one backend; `version` is empty for the newest of each table.

    Raises:
        ValueError: the package is not installed, or has no such system (those it has are listed).
    """

    system: str
    backend: str
    version: str = ""
    read: dict[str, str] = field(default_factory=dict, init=False)
    """Family of tables to the version that was read."""

    def __post_init__(self) -> None:
        systems = sorted(path.name for path in _data_folder().iterdir() if path.is_dir())
        if self.system not in systems:
            raise ValueError(unknown("system", self.system, systems, where="of aiconfigurator-core"))

    @property
    def package(self) -> str:
        return f"aiconfigurator-core {metadata.version('aiconfigurator-core')}"

    def gemm(self, n: int, k: int) -> tuple[pd.Series, str]:
        """Seconds of a bf16 [m, k] x [k, n] by m, and how it was composed (empty where n, k is measured).

        n beyond the grid's close steps is the sum of measured products; other n and k lie between measured ones.

        Raises:
            ValueError: n or k outside the grid.
        """
        table = self._gemms()
        parts_n, parts_k = _sum_on(_grid(table.columns, "n"), n, "n"), _between(_grid(table.columns, "k"), k, "k")
        total = sum(wn * wk * table[(on_n, on_k)] for wn, on_n in parts_n for wk, on_k in parts_k)
        notes = [_note("n", n, parts_n), _note("k", k, parts_k)]
        return pd.Series(total).dropna().sort_index(), "; ".join(filter(None, notes))

    def attention(self, q_heads: int, kv_heads: int, head_dim: int) -> tuple[pd.DataFrame, str]:
        """Causal prefill attention of one layer by (batch, tokens): whole prompts, bf16, no sliding window."""
        return self._heads("context_attention", q_heads, kv_heads, head_dim, ["batch_size", "isl"])

    def decode_attention(self, q_heads: int, kv_heads: int, head_dim: int) -> tuple[pd.DataFrame, str]:
        """Attention of one decode step of one layer by (decodes, KV tokens of each)."""
        frame, note = self._heads("generation_attention", q_heads, kv_heads, head_dim, ["batch_size", "kv_tokens"])
        return frame, note

    def experts(self, hidden: int, width: int, top_k: int, experts: int, tp: int, routing: str) -> pd.Series:
        """Seconds of the fused experts of one layer by tokens, for a routing distribution of the tables."""
        table, name = self._table("moe", "moe_perf")
        needed = ("moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts")
        require(table, [*needed, "moe_tp_size", "moe_ep_size", "distribution", "latency"], name)
        shape = {
            "moe_dtype": "bfloat16",
            "hidden_size": hidden,
            "inter_size": width,
            "topk": top_k,
            "num_experts": experts,
            "moe_tp_size": tp,
            "moe_ep_size": 1,
        }
        rows = _only(table, shape, name)
        rows = _only(rows, {"distribution": routing}, name)
        check_positive(rows, "latency", name)
        return rows.groupby("num_tokens")["latency"].median().sort_index() / 1e3

    def all_reduce(self, gpus: int, mode: str) -> pd.Series:
        """Seconds by message bytes: the backend's custom all-reduce (`mode` eager or graph) below 8 MiB, then NCCL.

        `message_size` counts elements of two bytes.
        """
        custom, name = self._table("comm", "custom_allreduce_perf")
        require(custom, ["allreduce_dtype", "num_gpus", "message_size", "kernel_source", "latency"], name)
        custom = _only(custom, {"allreduce_dtype": "bfloat16", "num_gpus": gpus}, name)
        modes = custom["kernel_source"].str.endswith(f"_{mode}")
        custom = custom[modes] if modes.any() else custom
        nccl, name = self._table("comm", "nccl_perf", folder="nccl")
        require(nccl, ["op_name", "nccl_dtype", "num_gpus", "message_size", "latency"], name)
        nccl = _only(nccl, {"op_name": "all_reduce", "nccl_dtype": "half", "num_gpus": gpus}, name)
        both = [
            custom[2 * custom["message_size"] < CUSTOM_ALL_REDUCE_BYTES],
            nccl[2 * nccl["message_size"] >= CUSTOM_ALL_REDUCE_BYTES],
        ]
        rows = pd.concat([part[["message_size", "latency"]] for part in both], ignore_index=True)
        check_positive(rows, "latency", name)
        return rows.assign(size=2 * rows["message_size"]).groupby("size")["latency"].median() / 1e3

    def _gemms(self) -> pd.DataFrame:
        """bf16 products: rows by m, columns by (n, k)."""
        table, name = self._table("gemm", "gemm_perf")
        return _gemm_grid(name, table)

    def _heads(
        self, kind: str, q_heads: int, kv_heads: int, head_dim: int, index: Sequence[str]
    ) -> tuple[pd.DataFrame, str]:
        table, name = self._table("attention", f"{kind}_perf")
        wanted = ["attn_dtype", "kv_cache_dtype", "head_dim", "num_heads", "num_key_value_heads", "batch_size", "isl"]
        require(table, [*wanted, "step", "latency"], name)
        shape = {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "head_dim": head_dim}
        if "window_size" in table.columns:
            shape["window_size"] = 0
        table = _only(_only(table, shape, name), {"num_key_value_heads": kv_heads}, name)
        check_positive(table, "latency", name)
        table = table.assign(kv_tokens=table["isl"] + table["step"], seconds=table["latency"] / 1e3)
        grid = table.groupby([*index, "num_heads"])["seconds"].median().unstack("num_heads")
        parts = _between(_grid(grid.columns, "num_heads"), q_heads, f"query heads with {kv_heads} KV heads")
        total = pd.Series(sum(weight * grid[heads] for weight, heads in parts)).dropna()
        note = _note("query heads", q_heads, parts)
        return total.rename("seconds").reset_index(), f"{note} with {kv_heads} KV heads" if note else ""

    def _table(self, family: str, table: str, folder: str = "") -> tuple[pd.DataFrame, str]:
        """A table and its name for messages; the newest version where none is asked for or it lacks the table."""
        root = _data_folder() / self.system / family / (folder or self.backend)
        versions = sorted((path.parent.name for path in root.glob(f"*/{table}.parquet")), key=_by_number)
        if not versions:
            where = f"{self.system}/{family}/{folder or self.backend}"
            raise ValueError(f"aiconfigurator-core has no {table} under {where}; choose another backend or system")
        version = self.version if self.version in versions else versions[-1]
        self.read[folder or family] = f"{folder or self.backend} {version}"
        path = root / version / f"{table}.parquet"
        return _read_parquet(path), f"{self.system}/{family}/{folder or self.backend}/{version}/{table}.parquet"


def _data_folder() -> Path:
    spec = util.find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations or util.find_spec("pyarrow") is None:
        raise ValueError(
            "the aiconfigurator tables need the packages aiconfigurator-core and pyarrow: "
            "pip install 'flowsim-prefill[aiconfigurator]'"
        )
    return Path(spec.submodule_search_locations[0]) / "systems" / "data"


@lru_cache(maxsize=16)
def _read_parquet(path: Path) -> pd.DataFrame:
    return pd.read_parquet(path)


_GRIDS: dict[str, pd.DataFrame] = {}


def _gemm_grid(name: str, table: pd.DataFrame) -> pd.DataFrame:
    if name not in _GRIDS:
        require(table, ["gemm_dtype", "m", "n", "k", "latency"], name)
        rows = _only(table, {"gemm_dtype": "bfloat16"}, name)
        check_positive(rows, "latency", name)
        _GRIDS[name] = rows.groupby(["m", "n", "k"])["latency"].median().unstack(["n", "k"]) / 1e3
    return _GRIDS[name]


def _only(table: pd.DataFrame, values: Mapping[str, object], name: str) -> pd.DataFrame:
    """The rows with these values; refused, with the values there are, where one column has none of them."""
    for column, value in values.items():
        rows = table[table[column] == value]
        if rows.empty:
            found = sorted(table[column].unique().tolist())
            raise ValueError(f"{name}: column {column} has no rows with {value!r}; found: {found}")
        table = rows
    return table


def _grid(columns: pd.Index, level: str) -> list[int]:
    return [int(value) for value in columns.unique(level)]


def _between(grid: Sequence[int], value: int, what: str) -> Weights:
    """Weights of the two grid points about a value, or the point itself.

    Raises:
        ValueError: the value is outside the grid.
    """
    points = sorted(grid)
    if value in points:
        return [(1.0, value)]
    if not points[0] < value < points[-1]:
        raise ValueError(f"{what} = {value} is outside the measured {points[0]} to {points[-1]}")
    low = max(point for point in points if point < value)
    high = min(point for point in points if point > value)
    share = (value - low) / (high - low)
    return [(1.0 - share, low), (share, high)]


def _sum_on(grid: Sequence[int], value: int, what: str) -> Weights:
    """As `_between`, but beyond the grid's last close step a sum of its largest points and a rest."""
    points = sorted(grid)
    close = next((low for low, high in pairwise(points) if high > GAP * low), points[-1])
    if value in points or value <= close or value > points[-1]:
        return _between(grid, value, what)
    whole, rest = divmod(value, close)
    return [(float(whole), close), *(_between(grid, rest, what) if rest else [])]


def _note(what: str, value: int, parts: Weights) -> str:
    if len(parts) == 1 and parts[0] == (1.0, value):
        return ""
    if any(weight >= 1.0 for weight, _ in parts):
        terms = [f"{point}" if weight == 1.0 else f"{weight:.3g} x {point}" for weight, point in parts]
        return f"{what} = {value} as {' + '.join(terms)}"
    return f"{what} = {value} between {parts[0][1]} and {parts[1][1]}"


def _by_number(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]
