"""A window of a run as a Gantt chart: who ran, who was paused, who waited. matplotlib is imported only when drawn."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowsim.log import Columns
from flowsim.metrics import Result
from flowsim.report.blocked import Blocked, worst_blocked
from flowsim.report.series import Intervals, busy
from flowsim.report.story import Chronicle, Story
from flowsim.report.style import PAGE_IN, Look, drawn, figure_of, looks, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["timeline", "worst_blocking"]

MARK = "0.92"  # the shade behind the row of the request that matters
DECODES = "0.78"  # the GPU's colour while no prefill is in its batch


@drawn
def worst_blocking(result: Result, title: str = "", *, rows: int = 14, width_in: float = PAGE_IN) -> Figure:
    """The window around the worst head-of-line blocking: the request that waited longest, in multiples of its SLO,
    while its GPU served less urgent ones; beside it those that ran, were paused or waited meanwhile.

    Where nobody waited for anything less urgent, the window is around the longest wait.

    Args:
        result: any run with at least one request that got to a GPU.
        title, width_in: as of `attainment`.
        rows: requests shown at most.
    """
    worst = worst_blocked(result) or _longest_wait(result)
    window_s = _window_s(worst, result.tables["requests"])
    told = textwrap.wrap(_told(worst, result.tables["requests"]), width=int(17 * width_in))
    title = "\n".join([*filter(None, [title]), *told])
    return _timeline(result, window_s, worst.instance, (worst.request, worst.behind), rows, title, width_in)


@drawn
def timeline(
    result: Result,
    window_s: tuple[float, float],
    *,
    instance: int = 0,
    title: str = "",
    rows: int = 14,
    width_in: float = PAGE_IN,
) -> Figure:
    """What one instance did between two seconds: its GPU in the first row, then a request in each.

    Args:
        result: any run.
        window_s: from and to, in simulated seconds.
        instance: the number of the instance.
        title, width_in: as of `attainment`.
        rows: requests shown at most: those that ran or waited longest in the window.

    Raises:
        ValueError: a window that is empty.
    """
    if not window_s[0] < window_s[1]:
        raise ValueError(f"window_s is {window_s}; it must be two seconds, the earlier one first")
    return _timeline(result, window_s, instance, (), rows, title, width_in)


def _timeline(
    result: Result,
    window_s: tuple[float, float],
    instance: int,
    wanted: Sequence[int],
    rows: int,
    title: str,
    width_in: float,
) -> Figure:
    requests = result.tables["requests"]
    shown, others = _shown(result, window_s, instance, wanted, rows)
    chronicle = Chronicle(result)
    styles = looks(sorted(set(requests["slo_class"].tolist())))
    height_in = 0.95 + 0.17 * (len(shown) + 1) + 0.13 * title.count("\n")
    figure = figure_of(width_in, height_in / width_in)
    if title:
        figure.suptitle(title, fontsize=8, x=0.01, ha="left")
    axes = figure.subplots()
    ran = busy(result.tables).at(instance)
    ran = Intervals(*(column[(ran.end_s > window_s[0]) & (ran.start_s < window_s[1])] for column in ran))
    _gpu(axes, ran, requests, styles)
    for place, request in enumerate(shown, start=1):
        if request in wanted[:1]:
            axes.axhspan(place - 0.5, place + 0.5, color=MARK, zorder=0)
        _row(axes, place, chronicle.story(request), requests, styles[requests["slo_class"][request]])
    names = [f"GPU of instance {instance}", *(_named(request, requests) for request in shown)]
    axes.set_yticks(range(len(names)), names)
    for tick, request in zip(axes.get_yticklabels()[1:], shown, strict=True):
        tick.set_fontweight("bold" if request in wanted[:1] else "normal")
    axes.tick_params("y", length=0)
    more = f" ({others} more {'wait' if others > 1 else 'waits'} or run meanwhile)" if others else ""
    axes.set(xlim=window_s, ylim=(len(shown) + 0.6, -0.6), xlabel=f"time [s]{more}")
    axes.grid(axis="y", visible=False)
    classes = sorted(set(requests["slo_class"][[*shown, *ran.request[ran.request >= 0].tolist()]].tolist()))
    _legend(figure, {**{name: styles[name].colour for name in classes}, **_decodes(ran)})
    return figure


def _shown(
    result: Result, window_s: tuple[float, float], instance: int, wanted: Sequence[int], rows: int
) -> tuple[list[int], int]:
    """The requests that get a row, in order of arrival, and how many others were there in the window."""
    requests = result.tables["requests"]
    here = requests["prefill_instance"] == instance
    until_s = np.where(np.isnan(requests["first_token_s"]), np.inf, requests["first_token_s"])
    there = np.flatnonzero(here & (requests["arrival_s"] < window_s[1]) & (until_s > window_s[0]))
    ran = busy(result.tables).at(instance)
    overlap_s = np.minimum(ran.end_s, window_s[1]) - np.maximum(ran.start_s, window_s[0])
    prefills = ran.request >= 0
    weights = np.maximum(overlap_s, 0.0)[prefills]
    ran_s = np.bincount(ran.request[prefills], weights=weights, minlength=len(here))[there]
    waited_s = np.minimum(until_s[there], window_s[1]) - np.maximum(requests["arrival_s"][there], window_s[0])
    rank = np.lexsort((-waited_s, -ran_s, ~np.isin(there, wanted)))[:rows]
    return sorted(there[rank].tolist()), max(0, len(there) - rows)


def _gpu(axes: Axes, ran: Intervals, requests: Columns, styles: dict[Any, Look]) -> None:
    stretches = np.column_stack([ran.start_s, ran.end_s - ran.start_s])
    classes = requests["slo_class"][ran.request].tolist()
    colours = [
        styles[name].colour if head >= 0 else DECODES for name, head in zip(classes, ran.request.tolist(), strict=True)
    ]
    axes.broken_barh(stretches.tolist(), (-0.4, 0.8), color=colours, edgecolor="white", linewidth=0.4)


def _row(axes: Axes, place: int, story: Story, requests: Columns, look: Look) -> None:
    """One request: a thin bar while it waits, a full one while it runs, a hatched one while it is paused."""
    kinds: dict[str, tuple[float, dict[str, Any]]] = {
        "waiting": (0.14, {"color": "0.6"}),
        "running": (0.72, {"color": look.colour}),
        "suspended": (0.5, {"facecolor": "white", "edgecolor": look.colour, "hatch": "////", "linewidth": 0.5}),
    }
    for state, (height, shown) in kinds.items():
        stretches = [(spell.start_s, spell.length_s) for spell in story.spells if spell.state == state]
        if stretches:
            axes.broken_barh(stretches, (place - height / 2, height), **shown)
    row = story.request
    arrival_s, first_s = float(requests["arrival_s"][row]), float(requests["first_token_s"][row])
    due_s = arrival_s + float(requests["ttft_slo_s"][row])
    axes.plot(arrival_s, place, "|", color="black", markersize=6, markeredgewidth=1.2)
    if np.isfinite(due_s):
        axes.plot(due_s, place - 0.36, "v", color="black", markersize=3.5)
    late = first_s > due_s
    axes.plot(first_s, place, "X" if late else "o", color="black" if late else "white", markeredgecolor="black",
              markersize=4.5, zorder=5)  # fmt: skip


def _decodes(ran: Intervals) -> dict[str, str]:
    """The legend's entry for batches that only decode, where there are some."""
    return {"decodes alone": DECODES} if (ran.request < 0).any() else {}


def _legend(figure: Figure, colours: dict[str, str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def mark(marker: str, face: str, size: float, name: str) -> Line2D:
        return Line2D(
            [], [], linestyle="", marker=marker, color=face, markeredgecolor="black", markersize=size, label=name
        )

    handles: list[Any] = [Patch(color=colour, label=plain(name)) for name, colour in colours.items()]
    handles += [
        Patch(color="0.35", label="runs"),
        Patch(facecolor="white", edgecolor="0.35", hatch="////", label="is paused"),
        Line2D([], [], color="0.6", linewidth=2.0, linestyle="-", label="waits"),
        mark("|", "black", 6, "arrives"),
        mark("v", "black", 3.5, "TTFT SLO"),
        mark("o", "white", 4.5, "first token in time"),
        mark("X", "black", 4.5, "late"),
    ]
    letters = sum(len(handle.get_label()) + 7 for handle in handles)
    rows = math.ceil(letters / (17 * figure.get_figwidth()))
    figure.set_figheight(figure.get_figheight() + 0.15 * (rows - 1))
    across = math.ceil(len(handles) / rows)
    figure.legend(handles=handles, loc="outside lower center", ncols=across, columnspacing=1.2, handlelength=1.6)


def _window_s(worst: Blocked, requests: Columns) -> tuple[float, float]:
    """Around the stretch behind one batch; the wait before and after as far as it is no longer than that."""
    span_s = max(worst.to_s - worst.from_s, 1e-3)
    row, other = worst.request, worst.behind
    began_s = min(requests["arrival_s"][row], np.nan_to_num(requests["start_s"][other], nan=np.inf))
    ended_s = np.nan_to_num(max(requests["first_token_s"][row], worst.to_s), nan=np.inf)
    low_s = max(float(began_s), worst.from_s - span_s)
    high_s = min(float(ended_s), worst.to_s + span_s)
    pad_s = 0.06 * (high_s - low_s)
    return low_s - pad_s, high_s + pad_s


def _longest_wait(result: Result) -> Blocked:
    """In place of a blocked request: the one that waited longest, behind nobody in particular.

    Raises:
        ValueError: no request got to a GPU.
    """
    requests = result.tables["requests"]
    if np.isnan(requests["start_s"]).all():
        raise ValueError("no request of the run got to a GPU: there is no wait to show")
    row = int(np.nanargmax(requests["queued_s"]))
    start_s = float(requests["start_s"][row])
    waited_s = float(requests["queued_s"][row])
    instance = int(requests["prefill_instance"][row])
    return Blocked(row, row, instance, start_s - waited_s, start_s, 0.0, waited_s)


def _told(worst: Blocked, requests: Columns) -> str:
    """Who waited for whom, in a sentence."""
    row, other = worst.request, worst.behind
    slo_s = requests["ttft_slo_s"][row]
    who = f"#{row} ({plain(requests['slo_class'][row])}" + (f", SLO {slo_s:.3g} s)" if np.isfinite(slo_s) else ")")
    if row == other:
        return f"{who} waited longest, {_span(worst.waited_s)}, and behind no later deadline"
    whom = f"#{other} ({plain(requests['slo_class'][other])}, {requests['prompt_tokens'][other]} tokens)"
    share = "all" if worst.behind_s > 0.995 * worst.waited_s else _span(worst.behind_s)
    return f"{who} waited {_span(worst.waited_s)}, {share} of it behind later deadlines, longest behind {whom}"


def _named(request: int, requests: Columns) -> str:
    return f"#{request} {plain(requests['slo_class'][request])}, {requests['prompt_tokens'][request]} tokens"


def _span(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"
