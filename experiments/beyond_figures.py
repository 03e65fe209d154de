"""The figures of `docs/beyond.md`."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments import beyond
from flowsim.report.style import PAGE_IN, drawn, figure_of, legend_above, looks

__all__ = ["ALONE", "ANY", "causes", "shares"]

ANY = "any schedule"
ALONE = "any without batching"


@drawn
def shares(goodput: pd.DataFrame, bound: pd.DataFrame) -> Figure:
    """Goodput (scenario by policy) as a share of the bound of any schedule; dashes where no schedule without batching
    is above."""
    figure = figure_of(PAGE_IN, 0.4)
    axes = figure.subplots()
    look = looks(beyond.POLICIES)
    for place, name in enumerate(beyond.POLICIES):
        share = [100.0 * goodput.loc[one, name] / bound.loc[one, ANY] for one in beyond.SCENARIOS]
        x = [at + (place - (len(beyond.POLICIES) - 1) / 2) * 0.1 for at in range(len(share))]
        axes.plot(x, share, look[name].marker, color=look[name].colour, label=name, markersize=5)
    alone = [100.0 * bound.loc[one, ALONE] / bound.loc[one, ANY] for one in beyond.SCENARIOS]
    for at, level in enumerate(alone):
        label = "no schedule without batching is above" if at == 0 else None
        axes.hlines(level, at - 0.4, at + 0.4, colors="0.4", linestyles="--", linewidth=1.0, label=label)
    axes.set_xticks(range(len(beyond.SCENARIOS)), list(beyond.SCENARIOS))
    axes.set(ylabel="goodput, % of the bound\nof any schedule", ylim=(0, 105))
    axes.grid(axis="y", alpha=0.4)
    legend_above(figure)
    return figure


@drawn
def causes(table: pd.DataFrame) -> Figure:
    """Misses by policy, stacked by cause."""
    pivot = table.pivot(index="cause", columns="policy", values="misses").fillna(0)
    pivot = pivot.loc[pivot.sum(axis=1).sort_values(ascending=False).index, list(beyond.MISSES)]
    figure = figure_of(PAGE_IN, 0.3)
    axes = figure.subplots()
    look = looks(pivot.index)
    left = pd.Series(0.0, index=pivot.columns)
    for cause in pivot.index:
        kind = look[cause]
        axes.barh(
            pivot.columns,
            pivot.loc[cause],
            left=left,
            color=kind.colour,
            hatch=kind.hatch,
            edgecolor="white",
            label=cause,
        )
        left += pivot.loc[cause]
    axes.invert_yaxis()
    axes.set(xlabel="requests that missed their TTFT SLO")
    legend_above(figure)
    return figure
