"""Figures of whole studies: a search for goodput, a grid of SLO scales, paired differences, a sweep at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from flowsim.report.bars import goodput
from flowsim.report.curves import attainment, parameter
from flowsim.report.curves import slo_scale as against_scale
from flowsim.report.style import PAGE_IN, drawn, figure_of, label, legend_above, plain, style
from flowsim.report.tidy import need

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["comparison", "grid", "scales", "search", "tuning"]

WIDTH_IN = 5.0


def search(
    table: pd.DataFrame,
    y: str,
    by: str | None,
    *,
    found_rps: float | None,
    interval_rps: Sequence[float] | None,
    target: float,
    title: str = "",
) -> Figure:
    """Attainment at the rates that a search tried, and where it ended: a dashed line in the grey of its interval.

    Args:
        table: a row per run, with `rate_rps` and `y`; the seeds become a mean and an interval.
        y, by: the figure held against the target, and the column that names the lines, None for one.
        found_rps, interval_rps: the goodput and its interval; None where there is none.
        target: the share of requests that was asked for.
        title: above the figure.
    """
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    figure = attainment(table, "rate_rps", y, by, target=target, title=title, width_in=WIDTH_IN)
    with style():
        (axes,) = figure.axes
        axes.xaxis.set_major_locator(MaxNLocator(8))
        axes.xaxis.set_major_formatter(ScalarFormatter(useOffset=False))
        if interval_rps:
            axes.axvspan(*interval_rps, color="black", alpha=0.1, linewidth=0, zorder=0)
        if found_rps is not None:
            axes.axvline(found_rps, color="black", linewidth=0.9, linestyle="--", zorder=1)
            axes.annotate(f" {found_rps:.3g}", (found_rps, 0.03), xycoords=("data", "axes fraction"), fontsize=7)
    return figure


def scales(
    table: pd.DataFrame, y: str, by: str | None, *, ticks: Sequence[float], target: float, title: str = ""
) -> Figure:
    """Attainment against the SLO scale on a logarithmic axis, loose to strict.

    Args:
        table: a row per run, with `slo_scale` and `y`.
        y, by, target, title: as of `search`.
        ticks: the scales that the axis names.
    """
    figure = against_scale(table, y=y, by=by, target=target, title=title, width_in=WIDTH_IN)
    with style():
        (axes,) = figure.axes
        axes.set_xscale("log")
        axes.set_xticks(list(ticks), [f"{scale:g}" for scale in ticks])
        axes.set_xticks([], minor=True)
    return figure


@drawn
def comparison(table: pd.DataFrame, by: str = "policy", *, against: str = "", title: str = "") -> Figure:
    """The paired differences of each figure with their intervals, a panel each beside a line at zero.

    A dot is filled where its interval does not reach zero.

    Args:
        table: as `flowsim.compare` answers it: `figure`, `difference`, `difference_low`, `difference_high`.
        by: the column that names the rows.
        against: the row that the differences are to; it is left out.
        title: above the figure.
    """
    need(table, [by, "figure", "difference", "difference_low", "difference_high"])
    table = table[table[by] != against]
    names = list(dict.fromkeys(table["figure"]))
    rows = list(dict.fromkeys(table[by]))
    panels_high = -(-len(names) // 3)
    height = panels_high * (0.55 + 0.2 * len(rows)) + 0.2
    figure = figure_of(PAGE_IN, height / PAGE_IN, f"{title}, differences to {plain(against)}" if against else title)
    panels = figure.subplots(panels_high, min(3, len(names)), squeeze=False, sharey=True).ravel()
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(panels, names, strict=False):
        axes.axvline(0.0, color="black", linewidth=0.8)
        for row in table[table["figure"] == name].itertuples():
            low, high = float(row.difference_low), float(row.difference_high)
            reach = np.nan_to_num([[row.difference - low], [high - row.difference]])
            sure = low > 0.0 or high < 0.0
            place = rows.index(getattr(row, by) if by.isidentifier() else table.at[row.Index, by])
            axes.errorbar(
                [row.difference], [place], xerr=reach, fmt="o", color="black", markersize=4,
                markerfacecolor="black" if sure else "white",
            )  # fmt: skip
        axes.set(xlabel=_of(name), ylim=(len(rows) - 0.5, -0.5))
        axes.set_yticks(range(len(rows)), [plain(str(row)) for row in rows])
        axes.ticklabel_format(axis="x", useOffset=False)
        axes.margins(x=0.1)
        axes.grid(axis="y", visible=False)
    return figure


def grid(
    table: pd.DataFrame, axes: list[str], y: str = "attainment", *, bounds: Sequence[str] = (), title: str = ""
) -> Figure:
    """One figure of a sweep over its axes: against the first that has numbers, a line for each combination of the
    others; with no such axis, against the combinations themselves.

    Args:
        table: as `flowsim.sweep` answers it; runs of several seeds become their mean and interval.
        axes: the columns that were varied.
        y: the figure.
        bounds: columns with what `y` could at best be: lines beside the others, or across the bars that cells without a
            number are then drawn as.
        title: above the figure.
    """
    import pandas as pd
    from pandas.api.types import is_numeric_dtype

    need(table, [*axes, y])
    numbers = next((name for name in axes if is_numeric_dtype(table[name])), None)
    others = [name for name in axes if name != numbers]
    words = table[others].astype(str).agg(", ".join, axis=1) if others else y.removesuffix("_rps")
    names = table.drop(columns=[name for name in ("x", "cell") if name in table])
    if numbers is None:
        cells = names.assign(cell=words if others else "run")
        if bounds:
            return goodput(cells, y, "cell", bound=bounds, title=title, width_in=WIDTH_IN)
        return parameter(cells, "cell", y, title=title)
    short = numbers.rpartition(".")[2]
    shown = names.drop(columns=short, errors="ignore").rename(columns={numbers: short}) if short != numbers else names
    shown = shown.assign(cell=words)
    shown = pd.concat([shown, *_bound_rows(shown, short, y, bounds)]) if bounds else shown
    return parameter(shown, short, y, "cell" if others or bounds else None, title=title)


@drawn
def tuning(table: pd.DataFrame, before_rps: float, *, title: str = "") -> Figure:
    """The goodput of each trial, the best so far as steps, and the goodput before tuning as a dashed line.

    Args:
        table: a row per trial, with `number` and `goodput_rps`.
        before_rps: of the parameters as they were.
        title: above the figure.
    """
    need(table, ["number", "goodput_rps"])
    figure = figure_of(WIDTH_IN, 0.42)
    axes = figure.subplots()
    number, goodput_rps = table["number"] + 1, table["goodput_rps"]
    axes.plot(number, goodput_rps, "o", color="0.55", markersize=3.5, label="trial")
    axes.step(number, goodput_rps.cummax(), where="post", color="black", linewidth=1.4, label="best so far")
    axes.axhline(before_rps, color="black", linewidth=0.9, linestyle="--", label="as it was")
    axes.set(xlabel="trial", ylabel=label("goodput_rps"))
    legend_above(figure, title)
    return figure


def _bound_rows(table: pd.DataFrame, x: str, y: str, bounds: Sequence[str]) -> list[pd.DataFrame]:
    """Each bound as rows of a series of its own, or of one for each cell where it is not the same in all."""
    found = []
    for bound in bounds:
        differs = table.groupby(x)[bound].nunique().max() > 1
        cell = label(bound) + ", " + table["cell"] if differs else label(bound)
        found.append(table[[x]].assign(**{y: table[bound]}, cell=cell).drop_duplicates())
    return found


def _of(figure: str) -> str:
    """`ttft_s.p99` as `p99 of TTFT [s]`."""
    column, _, statistic = figure.partition(".")
    return f"{statistic} of {label(column)}" if statistic else label(column)
