"""The file of a table: CSV that holds every number to the last bit.

Knows which columns hold what by their names; not what they mean.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flowsim.log import Columns

__all__ = ["is_float", "read_table", "whole", "write_table"]

Array = npt.NDArray[Any]
_TEXT = {"prefix_hashes", "slo_class", "outcome", "reason", "ended", "stops"}
_BOOLS = {"paused", "failed", "extrapolated", "measured"}
_MET = {"met_slo", "met_tbt"}
_WHOLE = {"prefill_instance", "decode_instance"}


def is_float(column: str) -> bool:
    """Whether a column holds floats; seconds do, by their names."""
    return column.endswith("_s") or column == "slowest_rank"


def whole(numbers: Array) -> Array:
    """Whole numbers, None where there is none."""
    return np.array([None if number != number else int(number) for number in numbers.tolist()], dtype=object)


def write_table(path: Path, columns: Columns) -> None:
    """Writes a table; None and NaN are empty cells."""
    cells = [["" if cell is None or cell != cell else cell for cell in column.tolist()] for column in columns.values()]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*cells, strict=True))


def read_table(path: Path) -> Columns:
    """The columns that `write_table` wrote, to the last bit.

    Raises:
        ValueError: a cell that its column cannot have.
    """
    import pandas as pd

    by_default = tuple(map(int, pd.__version__.split(".")[:2])) >= (3, 1)  # floats are read exactly
    try:
        with path.open(newline="", encoding="utf-8") as file:
            names = next(csv.reader(file), [])
            file.seek(0)
            kinds = {name: _kind(name) for name in names}
            frame = pd.read_csv(
                file,
                dtype=kinds,
                keep_default_na=False,
                na_values=[""],
                index_col=False,
                float_precision=None if by_default else "round_trip",
            )
        return {name: _parsed(name, frame[name].to_numpy(copy=True)) for name in names}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _kind(column: str) -> type:
    """As what a column's cells are read; an empty one is NaN."""
    if column in _TEXT | _MET:
        return object
    if column in _BOOLS:
        return bool
    return float if is_float(column) or column in _WHOLE else int


def _parsed(name: str, cells: Array) -> Array:
    """A column as `Result.of` makes it: with None where text, an answer or an instance is not there."""
    if name in _WHOLE:
        return whole(cells)
    if name in _MET:
        return np.array([cell == "True" if cell == cell else None for cell in cells.tolist()], dtype=object)
    if name in _TEXT:
        return np.array([cell if cell == cell else None for cell in cells.tolist()], dtype=object)
    return cells
