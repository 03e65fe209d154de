"""Series of points for figures, from a tidy table: means over seeds and their intervals. Knows no matplotlib."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flowsim.names import unknown

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Series", "interval", "need", "series"]


@dataclass(frozen=True)
class Series:
    """The points of one name: x in ascending order (or as the table has them where they are words), y, and the ends of
    y's intervals, NaN where there is none."""

    name: Any
    x: list[Any]
    y: npt.NDArray[np.float64]
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]

    @property
    def reach(self) -> npt.NDArray[np.float64]:
        """How far the intervals reach below and above, in two rows; 0 where there is none."""
        reach: npt.NDArray[np.float64] = np.nan_to_num(np.abs(np.array([self.y - self.low, self.high - self.y])))
        return reach


def series(table: pd.DataFrame, x: str, y: str, by: str | None) -> list[Series]:
    """A series for each value of the column `by`, in the table's order; one for the whole table where it is None.

    Where rows share `x` (a row per seed), y is their mean and its interval the 95 % interval of Student's t.
    Otherwise the columns `{y}_low` and `{y}_high` are the interval's ends, where the table has them.

    Raises:
        ValueError: a column that the table lacks.
    """
    need(table, [x, y] + ([by] if by else []))
    table = table[table[y].notna()]
    groups = table.groupby(by, sort=False) if by else [("", table)]
    return [_one(name, rows, x, y) for name, rows in groups]


def _one(name: Any, rows: pd.DataFrame, x: str, y: str) -> Series:
    places: list[Any] = list(dict.fromkeys(rows[x].tolist()))
    if all(isinstance(place, (int, float)) for place in places):
        places.sort()
    points = []
    for place in places:
        here = rows[rows[x] == place]
        points.append(interval(here[y].to_numpy(dtype=np.float64), *_ends(here, y)))
    middle, low, high = np.array(points).reshape(-1, 3).T
    return Series(name, places, middle, low, high)


def _ends(rows: pd.DataFrame, y: str) -> tuple[float, float]:
    columns = (f"{y}_low", f"{y}_high")
    if len(rows) > 1 or not set(columns) <= set(rows.columns):
        return np.nan, np.nan
    low, high = (float(rows[column].iloc[0]) for column in columns)
    return low, high


def interval(values: npt.NDArray[np.float64], low: float = np.nan, high: float = np.nan) -> tuple[float, float, float]:
    """The mean of some values, and the ends of its 95 % interval (Student's t); those given where one value is all."""
    mean = float(values.mean())
    if len(values) < 2:
        return mean, low, high
    from scipy.special import stdtrit

    half = float(stdtrit(len(values) - 1, 0.975) * values.std(ddof=1) / len(values) ** 0.5)
    return mean, mean - half, mean + half


def need(table: pd.DataFrame, columns: Iterable[str]) -> None:
    """Refuses a table that lacks a column, or has no rows.

    Raises:
        ValueError: with near names and the table's columns.
    """
    for column in columns:
        if column not in table.columns:
            raise ValueError(unknown("column", column, map(str, table.columns), "of the table to draw"))
    if table.empty:
        raise ValueError("the table to draw has no rows")
