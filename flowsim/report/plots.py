"""Figures of a run. matplotlib is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowsim.core import Request
from flowsim.metrics import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["NoReport", "Plots", "draw_workload", "ttft_cdf", "workload_figure"]

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


class NoReport:
    """The report `none`: no figures."""

    def write(self, result: Result, folder: Path, title: str) -> list[Path]:
        """Draws nothing."""
        return []


class Plots:
    """The report `plots`: `ttft.png`, the TTFT of each class against its SLO."""

    def write(self, result: Result, folder: Path, title: str) -> list[Path]:
        """Draws the run's figures into a folder; returns their paths."""
        import matplotlib as mpl

        path = folder / "ttft.png"
        with mpl.rc_context(STYLE):
            ttft_cdf(result, title).savefig(path, dpi=150)
        return [path]


def plain(name: str) -> str:
    """A class's name as matplotlib shows it letter by letter: no formula, and not hidden for a leading underscore."""
    return " " * name.startswith("_") + name.replace("$", r"\$")


def ttft_cdf(result: Result, title: str = "") -> Figure:
    """The share of each class's requests with their first token within a time; a dot where the SLO lies.

    The share is of all measured requests of the class: one that was rejected never gets there. A class whose
    requests have different SLOs gets no dot.
    """
    from matplotlib.figure import Figure

    everyone = result.tables["requests"]
    requests = {name: cells[everyone["measured"]] for name, cells in everyone.items()}
    figure = Figure(figsize=(6.4, 3.0), layout="constrained")
    axes = figure.subplots()
    marked = False
    for place, name in enumerate(sorted(set(requests["slo_class"].tolist()))):
        rows = requests["slo_class"] == name
        ttft_s = np.sort(requests["ttft_s"][rows & ~np.isnan(requests["ttft_s"])])
        share = np.arange(1, len(ttft_s) + 1) / rows.sum()
        colour, line = COLOURS[place % len(COLOURS)], LINES[place % len(LINES)]
        label = f"{plain(name)}, {rows.sum()} requests"
        slos_s = set(requests["ttft_slo_s"][rows].tolist())
        met = float((requests["met_slo"][rows] == True).mean())  # noqa: E712 (an object array)
        if len(slos_s) > 1:
            label += f"\n{met:.1%} within their SLOs"
        elif np.isfinite(slo_s := slos_s.pop()):
            marked = True
            label += f"\n{met:.1%} within {slo_s:g} s"
            axes.vlines(slo_s, 0.0, met, color=colour, linestyle=":", linewidth=0.9)
            axes.plot(slo_s, met, "o", color=colour, markersize=5, markeredgecolor="black", clip_on=False, zorder=5)
        if len(ttft_s):
            axes.step(ttft_s, share, where="post", color=colour, linestyle=line, linewidth=1.6, label=label)
    axes.set(xscale="log", xlabel="TTFT [s]", ylabel="share of requests", ylim=(0, 1.02), title=title)
    if marked:
        axes.plot([], [], "o", color="white", markeredgecolor="black", markersize=5, label="TTFT SLO")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right center", fontsize=8)
    return figure


def draw_workload(requests: Sequence[Request], path: Path, title: str) -> None:
    """Writes `workload_figure` to a file."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        workload_figure(requests, title).savefig(path, dpi=150)


def workload_figure(requests: Sequence[Request], title: str = "") -> Figure:
    """The arrival rate over time, in about sixty steps, beside a histogram of prompt lengths by class."""
    from matplotlib.figure import Figure

    arrival_s = np.array([request.arrival_s for request in requests])
    prompts = np.array([request.prompt_tokens for request in requests])
    classes = np.array([request.slo_class for request in requests], dtype=object)
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    rate_axes, length_axes = figure.subplots(1, 2)
    edges_s = np.linspace(0.0, max(float(arrival_s[-1]), 1e-9), min(60, max(2, len(requests) // 20)) + 1)
    counts, _ = np.histogram(arrival_s, edges_s)
    rate_axes.stairs(counts / np.diff(edges_s), edges_s, color=COLOURS[0], linewidth=1.4)
    rate_axes.set(xlabel="time [s]", ylabel="arrivals [requests/s]", ylim=(0, None), title=title)
    low, high = np.log10([max(1, prompts.min()), prompts.max() + 1])
    edges = np.logspace(low, high, 41)
    for place, name in enumerate(sorted(set(classes.tolist()))):
        counts, _ = np.histogram(prompts[classes == name], edges)
        style = {"color": COLOURS[place % len(COLOURS)], "linestyle": LINES[place % len(LINES)]}
        length_axes.stairs(counts, edges, linewidth=1.4, label=plain(name), **style)
    length_axes.set(xscale="log", xlabel="prompt [tokens]", ylabel="requests")
    length_axes.legend(fontsize=8)
    return figure
