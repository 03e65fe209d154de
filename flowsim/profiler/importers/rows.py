"""What every importer needs: rows of the trace for one operator, and tables read with their columns checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

__all__ = ["Origin", "check_positive", "operator_rows", "read_table", "require"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Whose times these are: the model and GPU in this project's names, the TP degree, and what measured them."""

    model: str
    gpu: str
    tp: int
    statistic: str
    software: str


def operator_rows(origin: Origin, operator: str, latency_s: Any, source: str, **counts: Any) -> pd.DataFrame:
    """Trace rows of one operator; `counts` are the trace's count columns, one value for all or one for each row."""
    latencies_s = np.asarray(latency_s, dtype=float)
    columns = {"new_tokens": 0, "cached_tokens": 0, "batch": 1, "repetitions": 1} | counts
    return pd.DataFrame(
        {
            "model": origin.model,
            "gpu": origin.gpu,
            "tp": origin.tp,
            "operator": operator,
            "latency_s": latencies_s,
            "statistic": origin.statistic,
            "software": origin.software,
            "source": source,
            **{name: np.broadcast_to(np.asarray(values), latencies_s.shape) for name, values in columns.items()},
        }
    )


def read_table(path: Path, needed: Sequence[str]) -> pd.DataFrame:
    """A CSV table with at least these columns.

    Raises:
        ValueError: unreadable, without one of the columns, or empty.
    """
    try:
        table = pd.read_csv(path)
    except (OSError, UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise ValueError(f"{path}: cannot read the table: {error}") from error
    require(table, needed, str(path))
    return table


def require(table: pd.DataFrame, needed: Sequence[str], name: str) -> None:
    """Refuses a table without one of these columns, or without rows.

    Raises:
        ValueError: with the missing columns and those found.
    """
    missing = [column for column in needed if column not in table.columns]
    if missing:
        raise ValueError(f"{name}: no column {', '.join(missing)}; found: {', '.join(map(str, table.columns))}")
    if table.empty:
        raise ValueError(f"{name}: the table has no rows")


def check_positive(table: pd.DataFrame, column: str, name: str) -> None:
    """Refuses values that are not finite and above 0; the index holds the rows of the file, from 0.

    Raises:
        ValueError: with the line of the file, the column and the value.
    """
    values = pd.to_numeric(table[column], errors="coerce").to_numpy(dtype=float)
    bad = np.flatnonzero(~(np.isfinite(values) & (values > 0.0)))
    if bad.size:
        line = int(table.index[bad[0]]) + 2
        found = table[column].iloc[int(bad[0])]
        raise ValueError(f"{name}: line {line}: {column} is {found}; allowed: a finite number above 0")
