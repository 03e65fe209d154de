"""Figures of studies with bars, boxes and tables, from tidy tables: a row per run or per point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowsim.report.style import COLUMN_IN, PAGE_IN, drawn, figure_of, label, legend_above, looks, plain, plain_decades
from flowsim.report.tidy import Series, need, series

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["blocking", "differences", "goodput", "matrix"]

GREY = "0.35"
BOUND_LINES = ("--", ":")


@drawn
def goodput(
    table: pd.DataFrame,
    y: str = "goodput_rps",
    by: str = "policy",
    over: str | None = None,
    *,
    bound: str | Sequence[str] | None = None,
    title: str = "",
    width_in: float = COLUMN_IN,
) -> Figure:
    """Goodput, or any other column, as bars with their values and intervals.

    Args:
        table: a row per bar, or several (seeds), as of `attainment`.
        y, by: the column of the bars' lengths, and the one that names the bars.
        over: a column (model, workload) for whose values the bars stand in groups; None for one group.
        bound: a column with what could at best be reached, drawn as a line across each bar, or several; the value's
            share of the first is beside it.
        title, width_in: as of `attainment`.
    """
    bounds = [bound] if isinstance(bound, str) else list(bound or ())
    need(table, [y, by, *([over] if over else []), *bounds])
    if over is None:
        return _lying_bars(table, y, by, bounds, title, width_in)
    return _standing_bars(table, y, by, over, bounds, title, width_in)


@drawn
def blocking(
    table: pd.DataFrame,
    y: str = "blocking_s",
    by: str = "stops",
    *,
    title: str = "",
    width_in: float = COLUMN_IN,
) -> Figure:
    """How long flags waited for their acknowledgement, by granularity: a box each, on a logarithmic axis.

    The box is the middle half with the median in it, the whiskers reach from the 1st to the 99th percentile, and the
    dot is the longest; times under a microsecond are drawn at a microsecond.

    Args:
        table: a row per preemption, such as `Result.preemptions` with `blocking_s = stopped_s - flagged_s`.
        y, by: the column of seconds, and the one that names the boxes.
        title, width_in: as of `attainment`.
    """
    need(table, [y, by])
    figure = figure_of(width_in, 0.55, title)
    axes = figure.subplots()
    groups = [(name, rows[y].to_numpy(dtype=np.float64)) for name, rows in table.groupby(by, sort=False)]
    for place, (_name, values_s) in enumerate(groups):
        shown_ms = 1e3 * np.maximum(values_s[~np.isnan(values_s)], 1e-6)
        if not len(shown_ms):
            continue
        low, q1, median, q3, high = np.percentile(shown_ms, [1, 25, 50, 75, 99]).tolist()
        axes.plot([low, high], [place, place], "-", color=GREY, linewidth=0.9)
        axes.barh(place, q3 - q1, left=q1, height=0.5, color="#9cc9e3", edgecolor="black")
        axes.plot([median, median], [place - 0.25, place + 0.25], "-", color="black", linewidth=1.8)
        axes.plot(shown_ms.max(), place, "o", color="white", markeredgecolor="black", markersize=3.5)
        axes.annotate(
            f"{median:.3g} ms", (median, place - 0.27), xytext=(0, 1), textcoords="offset points",
            ha="center", va="bottom", fontsize=6.5,
        )  # fmt: skip
    names = [f"{plain(str(name))}\n({len(values_s)})" for name, values_s in groups]
    axes.set_yticks(range(len(groups)), names)
    axes.set(xscale="log", xlabel=label(y).replace("[s]", "[ms]"), ylabel=label(by), ylim=(len(groups) - 0.4, -0.65))
    axes.grid(axis="y", visible=False)
    plain_decades(axes)
    return figure


@drawn
def differences(
    table: pd.DataFrame,
    y: str = "difference",
    by: str = "policy",
    *,
    against: str = "",
    title: str = "",
    width_in: float = COLUMN_IN,
) -> Figure:
    """Paired differences with their intervals beside a line at zero: what reaches the line is no difference.

    Args:
        table: as of `goodput`: a row per pair, or one with `{y}_low` and `{y}_high`.
        against: what the differences are to, for the axis.
        y, by, title, width_in: as of `attainment`.
    """
    need(table, [y, by])
    found = [_bar(name, rows, y) for name, rows in table.groupby(by, sort=False)]
    figure = figure_of(width_in, 0.16 + 0.075 * len(found), title)
    axes = figure.subplots()
    axes.axvline(0.0, color="black", linewidth=0.8)
    for place, one in enumerate(found):
        sure = one.low[0] > 0.0 or one.high[0] < 0.0
        fill = "black" if sure else "white"
        axes.errorbar(one.y, [place], xerr=one.reach, fmt="o", color="black", markerfacecolor=fill)
    axes.set_yticks(range(len(found)), [plain(str(one.name)) for one in found])
    axes.set(xlabel=label(y) + (f" to {plain(against)}" if against else ""), ylim=(len(found) - 0.5, -0.5))
    axes.grid(axis="y", visible=False)
    return figure


@drawn
def matrix(
    table: pd.DataFrame,
    rows: str = "policy",
    columns: str = "workload",
    y: str = "attainment",
    *,
    digits: int = 2,
    title: str = "",
    width_in: float = PAGE_IN,
) -> Figure:
    """A number for each pair of two columns' values, shaded from low to high; the highest of each column in bold.

    Rows of the table that share a pair (seeds) become their mean. `digits` is the number of decimals shown.
    """
    need(table, [rows, columns, y])
    means = table.pivot_table(index=rows, columns=columns, values=y, aggfunc="mean", sort=False)
    values = means.to_numpy(dtype=np.float64)
    figure = figure_of(width_in, (0.7 + 0.22 * len(values)) / width_in, title)
    axes = figure.subplots()
    image = axes.imshow(values, cmap="cividis", aspect="auto")
    darkest, lightest = float(np.nanmin(values)), float(np.nanmax(values))
    best = np.nanmax(values, axis=0)
    for (place, column), value in np.ndenumerate(values):
        if math.isnan(value):
            continue
        dark = value < darkest + 0.55 * (lightest - darkest)
        weight = "bold" if value == best[column] else "normal"
        axes.text(
            column, place, f"{value:.{digits}f}", ha="center", va="center", fontsize=7, weight=weight,
            color="white" if dark else "black",
        )  # fmt: skip
    crowded = values.shape[1] * max(len(str(name)) for name in means.columns) > 14 * width_in
    turned: dict[str, Any] = {"rotation": 30, "rotation_mode": "anchor", "ha": "right"} if crowded else {}
    axes.set_xticks(range(values.shape[1]), [plain(str(name)) for name in means.columns], **turned)
    axes.set_yticks(range(values.shape[0]), [plain(str(name)) for name in means.index])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    figure.colorbar(image, label=label(y), pad=0.01)
    return figure


# ---------------------------------------------------------------- parts of figures


def _bar(name: Any, rows: pd.DataFrame, y: str) -> Series:
    """One bar's value and interval, of rows that share a name."""
    (one,) = series(rows.assign(_all=0), "_all", y, None)
    return Series(name, one.x, one.y, one.low, one.high)


def _lying_bars(table: pd.DataFrame, y: str, by: str, bounds: list[str], title: str, width_in: float) -> Figure:
    groups = list(table.groupby(by, sort=False))
    figure = figure_of(width_in, 0.17 + 0.065 * len(groups), "" if bounds else title)
    axes = figure.subplots()
    styles = looks(name for name, _ in groups)
    for place, (name, rows) in enumerate(groups):
        one, look = _bar(name, rows, y), styles[name]
        value = float(one.y[0])
        axes.barh(place, value, height=0.66, color=look.colour, edgecolor="white", hatch=look.hatch, alpha=0.85)
        if one.reach.any():
            axes.errorbar(one.y, [place], xerr=one.reach, fmt="none", ecolor="black", elinewidth=0.9)
        end = max(value, float(np.nan_to_num(one.high[0])))
        best = [float(rows[name].mean()) for name in bounds]
        share = f" ({value / best[0]:.0%})" if best and best[0] > 0.0 else ""
        axes.annotate(
            f"{value:.3g}{share}", (end, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"} if bounds else None,
        )  # fmt: skip
        for at, line in zip(best, BOUND_LINES, strict=False):
            axes.plot([at, at], [place - 0.4, place + 0.4], line, color="black", linewidth=1.4)
    axes.set_yticks(range(len(groups)), [plain(str(name)) for name, _ in groups])
    axes.set(xlabel=label(y), ylim=(len(groups) - 0.4, -0.6))
    axes.margins(x=0.1)
    axes.grid(axis="y", visible=False)
    if bounds:
        for name, line in zip(bounds, BOUND_LINES, strict=False):
            axes.plot([], [], line, color="black", linewidth=1.4, label=label(name))
        legend_above(figure, title)
    return figure


def _standing_bars(
    table: pd.DataFrame, y: str, by: str, over: str, bounds: list[str], title: str, width_in: float
) -> Figure:
    figure = figure_of(width_in, 0.52 if width_in < 5.0 else 0.3)
    axes = figure.subplots()
    places = list(dict.fromkeys(table[over].tolist()))
    names = list(dict.fromkeys(table[by].tolist()))
    wide = 0.82 / len(names)
    for number, (name, look) in enumerate(looks(names).items()):
        for place, where in enumerate(places):
            rows = table[(table[by] == name) & (table[over] == where)]
            if rows.empty:
                continue
            one, at = _bar(name, rows, y), place + wide * (number - (len(names) - 1) / 2)
            legend = plain(str(name)) if where == places[0] else None
            axes.bar(at, one.y, width=0.94 * wide, color=look.colour, edgecolor="white", hatch=look.hatch,
                     alpha=0.85, label=legend)  # fmt: skip
            if one.reach.any():
                axes.errorbar([at], one.y, yerr=one.reach, fmt="none", ecolor="black", elinewidth=0.9, capsize=1.5)
            for bound, line in zip(bounds, ("-", ":"), strict=False):
                best = float(rows[bound].mean())
                axes.plot([at - wide / 2, at + wide / 2], [best, best], line, color="black", linewidth=1.2)
    axes.set_xticks(range(len(places)), [plain(str(place)) for place in places])
    axes.set(ylabel=label(y))
    axes.grid(axis="x", visible=False)
    for bound, line in zip(bounds, ("-", ":"), strict=False):
        axes.plot([], [], line, color="black", linewidth=1.2, label=label(bound))
    legend_above(figure, title)
    return figure
