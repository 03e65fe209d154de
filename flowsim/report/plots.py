"""Figures of a run. matplotlib is imported only when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowsim.metrics import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Plots", "ttft_cdf"]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # Okabe-Ito: colour-blind safe
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))  # told apart in grey as well
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "savefig.bbox": "tight",
}


class Plots:
    """The report `plots`: `ttft.png`, the TTFT of each class against its SLO."""

    def write(self, result: Result, folder: Path, title: str) -> list[Path]:
        """Draws the run's figures into a folder; returns their paths."""
        import matplotlib as mpl

        path = folder / "ttft.png"
        with mpl.rc_context(STYLE):
            ttft_cdf(result, title).savefig(path, dpi=150)
        return [path]


def ttft_cdf(result: Result, title: str = "") -> Figure:
    """The share of each class's requests with their first token within a time; a dot where the SLO lies.

    The share is of all requests of the class: one that was rejected never gets there. A class whose requests
    have different SLOs gets no dot.
    """
    from matplotlib.figure import Figure

    requests = result.tables["requests"]
    figure = Figure(figsize=(6.4, 3.0), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(sorted(set(requests["slo_class"].tolist()))):
        rows = requests["slo_class"] == name
        ttft_s = np.sort(requests["ttft_s"][rows & ~np.isnan(requests["ttft_s"])])
        share = np.arange(1, len(ttft_s) + 1) / rows.sum()
        colour, line = COLOURS[place % len(COLOURS)], LINES[place % len(LINES)]
        label = f"{name}, {rows.sum()} requests"
        slos_s = set(requests["ttft_slo_s"][rows].tolist())
        if len(slos_s) == 1 and np.isfinite(slo_s := slos_s.pop()):
            met = float((requests["met_slo"][rows] == True).mean())  # noqa: E712 (an object array)
            label += f"\n{met:.1%} within {slo_s:g} s"
            axes.vlines(slo_s, 0.0, met, color=colour, linestyle=":", linewidth=0.9)
            axes.plot(slo_s, met, "o", color=colour, markersize=5, markeredgecolor="black", clip_on=False, zorder=5)
        if len(ttft_s):
            axes.step(ttft_s, share, where="post", color=colour, linestyle=line, linewidth=1.6, label=label)
    axes.set(xscale="log", xlabel="TTFT [s]", ylabel="share of requests", ylim=(0, 1.02), title=title)
    axes.plot([], [], "o", color="white", markeredgecolor="black", markersize=5, label="TTFT SLO")
    figure.legend(loc="outside right center", fontsize=8)
    return figure
