"""Figures of studies with lines, from tidy tables: a row per run or per point, its settings in columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from flowsim.report.style import COLUMN_IN, LINES, PAGE_IN, Look, drawn, figure_of, label, legend_above, looks, plain
from flowsim.report.tidy import Series, series

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["attainment", "parameter", "slo_scale"]

GREY = "0.35"


@drawn
def attainment(
    table: pd.DataFrame,
    x: str = "rate_rps",
    y: str = "attainment",
    by: str | None = "policy",
    *,
    target: float | None = 0.9,
    title: str = "",
    width_in: float = COLUMN_IN,
) -> Figure:
    """Attainment, or any other column, against x: a line for each policy, its intervals, and the target.

    Args:
        table: a row per point. Rows that differ in nothing shown (seeds) become their mean and its 95 % interval;
            otherwise the columns `{y}_low` and `{y}_high` are the interval's ends, where there are such.
        x, y, by: the columns on the axes, and the one whose values are told apart; None for one line.
        target: a horizontal line, such as the share of requests that a goodput asks for; None for none.
        title: above the figure; papers have captions instead.
        width_in: in inches: `COLUMN_IN`, `PAGE_IN` or any other.

    Raises:
        ValueError: a column that the table lacks.
    """
    return _panels(table, x, [y], by, target=target, title=title, width_in=width_in)


@drawn
def slo_scale(
    table: pd.DataFrame,
    x: str = "slo_scale",
    y: str = "attainment",
    by: str | None = "policy",
    *,
    target: float = 0.9,
    title: str = "",
    width_in: float = COLUMN_IN,
) -> Figure:
    """Attainment against the SLO scale, loose to strict from left to right; a cross where each line leaves the target.

    Arguments as of `attainment`. The cross lies between the two points around it, by interpolation.
    """
    figure = _panels(table, x, [y], by, target=target, title=title, width_in=width_in)
    (axes,) = figure.axes
    axes.invert_xaxis()
    for one in series(table, x, y, by):
        for (x0, y0), (x1, y1) in pairwise(zip(one.x, one.y.tolist(), strict=True)):
            if y0 < target <= y1:
                strictest = x0 + (x1 - x0) * (target - y0) / (y1 - y0)
                axes.plot(strictest, target, "x", color="black", markersize=5, zorder=5)
                break
    return figure


@drawn
def parameter(
    table: pd.DataFrame,
    x: str,
    y: str | Sequence[str],
    by: str | None = None,
    *,
    target: float | None = None,
    title: str = "",
    width_in: float | None = None,
) -> Figure:
    """One or more columns against a parameter (chunk size, token budget, error, CV, TP), a panel each.

    Panels lie side by side on a page's width, one above the other in a column. Values of x are the ticks; a parameter
    that spans a factor of sixteen gets a logarithmic axis, words get equal steps. Other arguments as of `attainment`;
    the target is of the first panel.
    """
    columns = [y] if isinstance(y, str) else list(y)
    width_in = width_in or (COLUMN_IN if len(columns) == 1 else PAGE_IN)
    return _panels(table, x, columns, by, target=target, title=title, width_in=width_in)


# ---------------------------------------------------------------- parts of figures


def _panels(
    table: pd.DataFrame,
    x: str,
    columns: Sequence[str],
    by: str | None,
    *,
    target: float | None,
    title: str,
    width_in: float,
) -> Figure:
    side_by_side = width_in >= 5.0
    shape = (1, len(columns)) if side_by_side else (len(columns), 1)
    aspect = 0.08 + 0.54 / max(len(columns), 2) if side_by_side else 0.04 + 0.52 * len(columns)
    figure = figure_of(width_in, aspect)
    panels = figure.subplots(*shape, sharex=not side_by_side, squeeze=False).flat
    found = [[_within(one, y) for one in series(table, x, y, by)] for y in columns]
    styles = looks(one.name for of_column in found for one in of_column)
    for axes, y, lines in zip(panels, columns, found, strict=True):
        steps = _x_axis(axes, [place for one in lines for place in one.x])
        for one in lines:
            _line(axes, one, [steps[place] for place in one.x], styles[one.name])
        axes.set(ylabel=label(y))
        if side_by_side or y == columns[-1]:
            axes.set(xlabel=label(x))
        _y_axis(axes, y)
    if target is not None:
        figure.axes[0].axhline(target, color=GREY, linewidth=0.8, linestyle=LINES[5], zorder=1)
    if by is None:
        figure.suptitle(title, fontsize=8)
    else:
        legend_above(figure, title)
    return figure


def _is_share(column: str) -> bool:
    return column in ("attainment", "utilisation", "share") or column.endswith(("_share", "_attainment"))


def _within(one: Series, column: str) -> Series:
    """The same points; the interval of a share, which few seeds make wide, ends at nothing and at the whole."""
    if not _is_share(column):
        return one
    return replace(one, low=np.clip(one.low, 0.0, 1.0), high=np.clip(one.high, 0.0, 1.0))


def _line(axes: Axes, one: Series, x: Sequence[float], look: Look) -> None:
    name = plain(str(one.name))
    if one.reach.any():
        axes.errorbar(x, one.y, yerr=one.reach, fmt="none", ecolor=look.colour, elinewidth=0.8)
    axes.plot(
        x, one.y, color=look.colour, linestyle=look.line, marker=look.marker, markeredgecolor="white",
        markeredgewidth=0.4, label=name, clip_on=False, zorder=3,
    )  # fmt: skip


def _x_axis(axes: Axes, places: Sequence[Any]) -> dict[Any, float]:
    """Scales the axis for some values, and says where on it each lies."""
    distinct = list(dict.fromkeys(places))
    if not all(isinstance(place, (int, float)) for place in distinct):
        axes.set_xticks(range(len(distinct)), [plain(str(place)) for place in distinct])
        return {place: float(number) for number, place in enumerate(distinct)}
    distinct.sort()
    if _is_geometric(distinct):
        axes.set_xscale("log", base=2)
        axes.set_xticks([], minor=True)
    if len(distinct) <= 9:
        ticks = _apart(distinct) if axes.get_xscale() == "linear" else distinct
        axes.set_xticks(ticks, [f"{place:g}" for place in ticks])
    return {place: float(place) for place in distinct}


def _apart(values: Sequence[float]) -> list[float]:
    """Those of some values, in ascending order, that leave room for a number between them on a linear axis."""
    kept: list[float] = []
    for value in values:
        if not kept or value - kept[-1] >= 0.07 * (values[-1] - values[0]):
            kept.append(value)
    return kept


def _is_geometric(values: Sequence[float]) -> bool:
    """Whether values, in ascending order, grow by about the same factor each time."""
    if len(values) < 3 or values[0] <= 0 or values[-1] < 4 * values[0]:
        return False
    steps = [math.log(high / low) for low, high in pairwise(values)]
    return max(steps) < 1.8 * min(steps)


def _y_axis(axes: Axes, y: str) -> None:
    """Shares as percentages; everything else from zero, and attainment to the whole."""
    from matplotlib.ticker import PercentFormatter

    if _is_share(y):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(0.0 if axes.get_ylim()[0] < 0.5 else None, 1.0)
    elif axes.get_ylim()[0] > 0.0:
        axes.set_ylim(bottom=0.0)
