"""The operator trace: the one long table that importers and the collector write and the fit reads.

A row is one measured operator call of one model on one GPU (one tensor-parallel rank). Knows the table's columns
and rules; knows nothing of models, fits or profiles.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import pandas as pd

__all__ = ["COLUMNS", "OPERATORS", "OPTIONAL", "read_trace", "validate", "write_trace"]

TEXTS = ("model", "gpu", "operator", "statistic", "software", "source")
COLUMNS = (
    "model",
    "gpu",
    "tp",
    "operator",
    "new_tokens",
    "cached_tokens",
    "batch",
    "latency_s",
    "statistic",
    "repetitions",
    "software",
    "source",
)
OPTIONAL = ("experts", "decodes", "decode_kv_tokens", "sequences")
"""Counts that only some operators have; 0 where the column or the value is absent."""

_SMALLEST = {"tp": 1, "batch": 1, "repetitions": 1, "new_tokens": 0, "cached_tokens": 0} | dict.fromkeys(OPTIONAL, 0)

OPERATORS = (
    "embedding",
    "residual_add",
    "input_norm",
    "qkv_gemm",
    "qk_norm",
    "rope",
    "attention",
    "o_proj_gemm",
    "all_reduce_attention",
    "post_attention_residual_add",
    "post_attention_norm",
    "gate_up_gemm",
    "act",
    "down_gemm",
    "router_gemm",
    "experts",
    "all_reduce_mlp",
    "final_norm",
    "lm_head",
    "sampler",
)
"""The operators of a pass in the order in which they run; a model has some of them."""

CHECKS = ("whole_", "check_")
"""Beginnings of names of rows that are compared with and never fitted: `whole_prefill`, `whole_layer`, `check_...`."""


def read_trace(path: str | Path) -> pd.DataFrame:
    """The validated trace in a `.csv`, `.csv.gz` or `.parquet` file.

    Raises:
        ValueError: no such file, another kind of file, no rows, or a row that breaks a rule (with file, line, column).
    """
    path = Path(path)
    try:
        frame = _reader(path)(path)
    except (OSError, UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise ValueError(f"{path}: cannot read the operator trace: {error}") from error
    return validate(frame, str(path))


def write_trace(frame: pd.DataFrame, path: str | Path) -> None:
    """Writes a validated trace, all columns in their order; the suffix names the format as in `read_trace`.

    Raises:
        ValueError: a row that breaks a rule, or a suffix that is not known.
    """
    path = Path(path)
    reader = _reader(path)
    frame = validate(frame, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if reader is _read_parquet:
        frame.to_parquet(path, index=False)
    else:
        frame.to_csv(path, index=False, lineterminator="\n")


def validate(frame: pd.DataFrame, source_name: str) -> pd.DataFrame:
    """The trace with all columns in their order and types; others are dropped. Latencies in seconds, counts whole.

    Raises:
        ValueError: a missing column, an empty table, or a value against its rule; names the line in the file
            (the header is line 1), the column, what was found and what is allowed.
    """
    missing = [name for name in COLUMNS if name not in frame.columns]
    if missing:
        found = ", ".join(map(str, frame.columns)) or "none"
        raise ValueError(f"{source_name}: no column {', '.join(missing)}; found: {found}")
    if frame.empty:
        raise ValueError(f"{source_name}: the operator trace has no rows")
    frame = frame.reset_index(drop=True)
    clean = {name: _column(frame, name, source_name) for name in (*COLUMNS, *OPTIONAL)}
    trace = pd.DataFrame(clean)
    _check_operators(trace, source_name)
    idle = (trace[["new_tokens", "decodes", "sequences"]] == 0).all(axis=1)
    if idle.any():
        row = int(np.flatnonzero(idle)[0])
        _refuse(source_name, row, "new_tokens", 0, "1 or more, unless decodes or sequences is")
    return trace


def _column(frame: pd.DataFrame, name: str, source_name: str) -> pd.Series:
    if name in TEXTS:
        return _texts(frame[name], name, source_name)
    if name in OPTIONAL:
        values = frame[name] if name in frame.columns else pd.Series(0, index=frame.index)
        values = values.replace("", 0).fillna(0)
    else:
        values = frame[name]
    numbers = pd.to_numeric(values, errors="coerce").astype(float)
    if name == "latency_s":
        bad = ~(np.isfinite(numbers) & (numbers > 0.0))
        allowed = "finite seconds above 0"
    else:
        bad = ~(np.isfinite(numbers) & (numbers >= _SMALLEST[name]) & (numbers == np.floor(numbers)))
        allowed = f"a whole number, {_SMALLEST[name]} or more"
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        _refuse(source_name, row, name, values.iloc[row], allowed)
    return numbers if name == "latency_s" else numbers.astype(int)


def _texts(values: pd.Series, name: str, source_name: str) -> pd.Series:
    texts = values.fillna("").astype(str).str.strip()
    empty = texts == ""
    if empty.any():
        _refuse(source_name, int(np.flatnonzero(empty)[0]), name, "", "a text")
    return texts.astype(object)


def _check_operators(trace: pd.DataFrame, source_name: str) -> None:
    known = trace["operator"].isin(OPERATORS) | trace["operator"].str.startswith(CHECKS)
    if known.all():
        return
    row = int(np.flatnonzero(~known)[0])
    name = str(trace["operator"].iloc[row])
    near = difflib.get_close_matches(name, OPERATORS, n=2)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    _refuse(source_name, row, "operator", name, f"{hint}one of {', '.join(OPERATORS)}, or whole_... or check_...")


def _refuse(source_name: str, row: int, column: str, found: object, allowed: str) -> NoReturn:
    shown = repr(found) if isinstance(found, str) else str(found)
    raise ValueError(f"{source_name}: line {row + 2}: {column} is {shown}; allowed: {allowed}")


def _reader(path: Path) -> Callable[[Path], pd.DataFrame]:
    if path.name.endswith((".csv", ".csv.gz")):
        return _read_csv
    if path.suffix == ".parquet":
        return _read_parquet
    raise ValueError(f"{path}: an operator trace is a .csv, .csv.gz or .parquet file")


def _read_csv(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def _read_parquet(path: Path) -> pd.DataFrame:
    try:
        import pyarrow  # noqa: F401  (pandas needs it to read and write Parquet)
    except ImportError as error:
        raise ValueError(f"{path}: Parquet needs pyarrow; `pip install pyarrow`, or use a .csv file") from error
    return pd.read_parquet(path)
