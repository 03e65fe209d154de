"""Figures of one run, or of one workload. matplotlib is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from flowsim.core import Request
from flowsim.log import Columns
from flowsim.metrics import Result
from flowsim.report.style import COLOURS, PAGE_IN, drawn, figure_of, legend_above, looks, plain, plain_decades

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["tbt_cdf", "ttft_cdf", "workload_figure"]


@drawn
def ttft_cdf(result: Result, title: str = "", *, width_in: float = 6.4) -> Figure:
    """The share of each class's requests with their first token within a time; a dot where the SLO lies.

    The share is of all measured requests of the class: one that was rejected never gets there. A class whose
    requests have different SLOs gets no dot.
    """
    table = result.tables["requests"]
    requests = {name: cells[table["measured"]] for name, cells in table.items()}
    return _cdf(requests, ("ttft_s", "ttft_slo_s", "met_slo"), ("TTFT", "TTFT"), title, width_in)


@drawn
def tbt_cdf(result: Result, title: str = "", *, width_in: float = 6.4) -> Figure:
    """The same of TBT, a request's mean, for a run that decodes: the share of the requests of two tokens or more.

    Raises:
        ValueError: nothing was decoded in that run.
    """
    table = result.tables["requests"]
    if "tbt_mean_s" not in table:
        raise ValueError("tbt_cdf: nothing was decoded in this run; see cluster=pd and cluster=colocated")
    rows = table["measured"] & (table["output_tokens"] > 1)
    requests = {name: cells[rows] for name, cells in table.items()}
    return _cdf(requests, ("tbt_mean_s", "tbt_slo_s", "met_tbt"), ("TBT", "mean TBT of a request"), title, width_in)


def _cdf(
    requests: Columns, columns: tuple[str, str, str], words: tuple[str, str], title: str, width_in: float
) -> Figure:
    """Of each class the share of its requests within a time; `columns` are the time, its SLO and whether that was met,
    `words` what they are of and what the axis shows."""
    (value, slo, answer), (name_of_slo, shown) = columns, words
    figure = figure_of(width_in, 0.47 if width_in >= 5.0 else 0.6)
    axes = figure.subplots()
    marked = False
    for name, look in looks(sorted(set(requests["slo_class"].tolist()))).items():
        rows = requests["slo_class"] == name
        times_s = np.sort(requests[value][rows & ~np.isnan(requests[value])])
        share = np.arange(1, len(times_s) + 1) / rows.sum()
        label = f"{plain(name)}, {rows.sum()} requests"
        slos_s = set(requests[slo][rows].tolist())
        met = float((requests[answer][rows] == True).mean())  # noqa: E712 (an object array)
        if len(slos_s) > 1:
            label += f"\n{met:.1%} within their SLOs"
        elif np.isfinite(slo_s := slos_s.pop()):
            marked = True
            label += f"\n{met:.1%} within {slo_s:g} s"
            axes.vlines(slo_s, 0.0, met, color=look.colour, linestyle=":", linewidth=0.9)
            axes.plot(slo_s, met, "o", color=look.colour, markeredgecolor="black", clip_on=False, zorder=5)
        if len(times_s):
            axes.step(times_s, share, where="post", color=look.colour, linestyle=look.line, label=label)
    axes.set(xlabel=f"{shown} [s]", ylabel="share of requests", ylim=(0, 1.02))
    there_s = requests[value][requests[value] > 0.0]
    if len(there_s) and there_s.max() >= 10.0 * there_s.min():  # less may lie between the ticks of decades
        axes.set_xscale("log")
        plain_decades(axes)
    if marked:
        axes.plot([], [], "o", color="white", markeredgecolor="black", label=f"{name_of_slo} SLO")
    if width_in < 5.0:
        legend_above(figure, title)
        return figure
    axes.set_title(title)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right center", labelspacing=0.8)
    return figure


@drawn
def workload_figure(requests: Sequence[Request], title: str = "") -> Figure:
    """The arrival rate over time, in about sixty steps, beside a histogram of prompt lengths by class."""
    arrival_s = np.array([request.arrival_s for request in requests])
    prompts = np.array([request.prompt_tokens for request in requests])
    classes = np.array([request.slo_class for request in requests], dtype=object)
    figure = figure_of(PAGE_IN, 0.39)
    rate_axes, length_axes = figure.subplots(1, 2)
    edges_s = np.linspace(0.0, max(float(arrival_s[-1]), 1e-9), min(60, max(2, len(requests) // 20)) + 1)
    counts, _ = np.histogram(arrival_s, edges_s)
    rate_axes.stairs(counts / np.diff(edges_s), edges_s, color=COLOURS[0], linewidth=1.3)
    rate_axes.set(xlabel="time [s]", ylabel="arrivals [requests/s]", ylim=(0, None), title=title)
    low, high = np.log10([max(1, prompts.min()), prompts.max() + 1])
    edges = np.logspace(low, high, 41)
    for name, look in looks(sorted(set(classes.tolist()))).items():
        counts, _ = np.histogram(prompts[classes == name], edges)
        length_axes.stairs(counts, edges, linewidth=1.3, label=plain(name), color=look.colour, linestyle=look.line)
    length_axes.set(xscale="log", xlabel="prompt [tokens]", ylabel="requests")
    length_axes.legend()
    return figure
