"""The charts of the page, as figures for plotly.js: plain dictionaries of traces and a layout.

A trace's `colour` is its place in the palette; the page knows the palettes and puts in what suits its theme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flowsim.log import Columns
from flowsim.metrics import Result
from flowsim.report.series import Steps, busy, counted, last_s, means, peaks, shares, suspended, waiting

__all__ = [
    "Figure",
    "blocking",
    "latency_cdf",
    "over_time",
    "pauses",
    "side_by_side_cdf",
    "suspension",
    "ttft_histogram",
]

Array = npt.NDArray[Any]
Figure = dict[str, Any]

DASHES = ("solid", "dash", "dashdot", "dot", "longdash", "longdashdot")  # told apart in grey as well
POINTS = 400  # of a distribution drawn as a line
BINS = 40  # of a histogram
TIMES = 120  # bins over a run
FINEST_S = 1e-4  # where a logarithmic axis of times begins


def latency_cdf(result: Result, classes: Sequence[str], column: str, label: str, slo: str | None = None) -> Figure:
    """The share of each class's measured requests with at most a time; a line and a dot where the SLO lies."""
    requests = measured(result)
    traces = []
    for place, name in enumerate(classes):
        rows = requests["slo_class"] == name
        times_s = requests.get(column, np.full(len(rows), np.nan))[rows]
        if not rows.any() or np.isnan(times_s).all():
            continue
        x, y = distribution(np.maximum(times_s[~np.isnan(times_s)], FINEST_S), int(rows.sum()))
        told = f"{name} ({rows.sum()})"
        slos_s = set(requests[slo][rows].tolist()) if slo else set()
        if len(slos_s) == 1 and np.isfinite(slo_s := slos_s.pop()):
            met = float((times_s <= slo_s).sum() / rows.sum())
            told += f": {met:.2%} within {slo_s:g} s"
            traces.append(slo_mark(slo_s, met, told, place, name))
        traces.append(line(x, y, told, place, group=name, shape="hv"))
    return figure(traces, x={"title": {"text": label}, "type": "log"}, y={"title": {"text": "share of requests"}})


def ttft_histogram(result: Result, classes: Sequence[str], span_s: tuple[float, float]) -> Figure:
    """How many requests of each class have which TTFT, a row for each, with a line where the SLO lies."""
    requests = measured(result)
    edges_s = np.geomspace(*span_s, BINS + 1)
    traces, shapes, axes = [], [], {}
    for place, name in enumerate(classes):
        rows = requests["slo_class"] == name
        counts, _ = np.histogram(requests["ttft_s"][rows & ~np.isnan(requests["ttft_s"])], edges_s)
        axis = axis_name("y", len(classes) - place)
        trace = line(edges_s, np.append(counts, 0), name, place, dash="solid", shape="hv")
        traces.append({**trace, "yaxis": axis.replace("axis", ""), "fill": "tozeroy"})
        axes[axis] = {
            "title": {"text": name},
            "domain": row_domain(len(classes) - 1 - place, len(classes)),
            "rangemode": "tozero",
        }
        slos_s = set(requests["ttft_slo_s"][rows].tolist())
        if len(slos_s) == 1 and np.isfinite(slo_s := slos_s.pop()):
            shapes.append(vertical(slo_s, f"{axis.replace('axis', '')} domain", f"SLO {slo_s:g} s"))
    x = {"title": {"text": "TTFT [s]"}, "type": "log", "anchor": "free", "position": 0}
    return figure(traces, x=x, y={}, height=max(260, 130 * len(classes)), shapes=shapes, showlegend=False, **axes)


def over_time(result: Result, classes: Sequence[str]) -> Figure:
    """Attainment, load and utilisation, queue and KV blocks over simulated time, under each other on one axis."""
    tables, run = result.tables, result.run
    edges_s = np.linspace(0.0, max(last_s(tables), 1e-9), TIMES + 1)
    at_s, width_s = (edges_s[:-1] + edges_s[1:]) / 2, edges_s[1]
    instances, asked = run["instances"], _asked(run)
    requests = tables["requests"]
    gpu_s = np.nan_to_num(requests["isolated_s"] - run.get("request_s", 0.0))
    asked_s, _ = np.histogram(requests["arrival_s"], edges_s, weights=gpu_s)
    use, queue, parked = busy(tables), waiting(tables), suspended(tables)
    traces = [
        *_attainment(requests, classes),
        panel(2, line(at_s, asked_s / width_s / asked, "offered load", 0)),
        panel(2, line(at_s, shares(use, edges_s) / instances, "utilisation", 1, dash="dash")),
    ]
    if 1 < instances <= 8:
        for instance in range(instances):
            one = line(at_s, shares(use.at(instance), edges_s), f"utilisation of {instance}", 1, dash="dot")
            traces.append(panel(2, {**one, "visible": "legendonly"}))
    traces += [
        panel(3, line(at_s, shares(queue, edges_s), "waiting, mean", 2)),
        panel(3, line(at_s, peaks(counted(queue), edges_s), "waiting, peak", 2, dash="dot")),
        panel(3, line(at_s, shares(parked, edges_s), "batches suspended, mean", 3, dash="dash")),
        *(panel(4, trace) for trace in _kv(tables["kv"], run["kv_blocks"], edges_s)),
    ]
    titles = ("attained", "GPU seconds a second<br>and instance", "requests", "KV blocks, share")
    axes: Figure = {}
    for place, title in enumerate(titles, start=1):
        domain = row_domain(len(titles) - place, len(titles), gap=0.075)
        axes[axis_name("y", place)] = {"title": {"text": title}, "domain": domain, "rangemode": "tozero"}
        axes[f"legend{place if place > 1 else ''}"] = {"orientation": "h", "x": 0, "y": domain[1], "yanchor": "bottom"}
    axes["yaxis"]["range"] = [0, 1.02]
    x = {"title": {"text": "simulated time [s]"}, "anchor": "y4"}
    return figure(traces, x=x, y=axes.pop("yaxis"), height=800, hovermode="x unified", **axes)


def blocking(result: Result) -> Figure:
    """How long it took from the signal to stop to its acknowledgement."""
    table = result.tables["preemptions"]
    blocked_s = table["stopped_s"] - table["flagged_s"]
    traces = []
    kinds = (("suspended", table["paused"], 0), ("had reached its end", ~table["paused"], 1))
    for name, rows, place in kinds:
        if rows.any():
            values_ms, share = distribution(np.maximum(blocked_s[rows], 1e-6) * 1e3, int(rows.sum()))
            traces.append(line(values_ms, share, f"{name} ({rows.sum()})", place, shape="hv"))
    x = {"title": {"text": "from signal to acknowledgement [ms]"}, "type": "log"}
    return figure(traces, x=x, y={"title": {"text": "share of signals"}})


def suspension(result: Result, classes: Sequence[str]) -> Figure:
    """How long the requests that were suspended at all were so, by class."""
    requests = result.tables["requests"]
    traces = []
    for place, name in enumerate(classes):
        suspended_s = requests["suspended_s"][requests["slo_class"] == name]
        suspended_s = suspended_s[suspended_s > 0.0]
        if len(suspended_s):
            values_s, share = distribution(suspended_s, len(suspended_s))
            traces.append(line(values_s, share, f"{name} ({len(suspended_s)})", place, shape="hv"))
    x = {"title": {"text": "suspended [s]"}, "type": "log"}
    return figure(traces, x=x, y={"title": {"text": "share of the suspended"}})


def pauses(result: Result, classes: Sequence[str]) -> Figure:
    """Who was paused for whom, by class: a count for each pair."""
    requests, table = result.tables["requests"], result.tables["preemptions"]
    places = {name: place for place, name in enumerate(classes)}
    counts = np.zeros((len(classes), len(classes)), dtype=np.int64)
    names = requests["slo_class"]
    paused = table["paused"]
    for victim, by in zip(names[table["victim"][paused]].tolist(), names[table["by"][paused]].tolist(), strict=True):
        counts[places[victim], places[by]] += 1
    trace = {
        "type": "heatmap", "z": counts.tolist(), "x": list(classes), "y": list(classes), "texttemplate": "%{z}",
        "showscale": False, "hovertemplate": "%{y} paused for %{x}: %{z}<extra></extra>", "heat": True,
    }  # fmt: skip
    x, y = {"title": {"text": "for a request of class"}}, {"title": {"text": "a batch of class was paused"}}
    return figure([trace] if paused.any() else [], x=x, y={**y, "autorange": "reversed"}, showlegend=False)


def side_by_side_cdf(results: Mapping[str, Result], name: str) -> Figure:
    """The TTFTs of one class under several runs."""
    traces = []
    slos_s: set[float] = set()
    for place, (label, result) in enumerate(results.items()):
        requests = measured(result)
        rows = requests["slo_class"] == name
        ttft_s = requests["ttft_s"][rows]
        slos_s |= set(requests["ttft_slo_s"][rows].tolist())
        if (~np.isnan(ttft_s)).any():
            values_s, share = distribution(ttft_s[~np.isnan(ttft_s)], int(rows.sum()))
            traces.append(line(values_s, share, label, place, shape="hv"))
    finite_s = sorted(slo_s for slo_s in slos_s if np.isfinite(slo_s))
    shapes = [vertical(slo_s, "y domain", f"SLO {slo_s:g} s") for slo_s in finite_s[:1] if len(slos_s) == 1]
    x = {"title": {"text": f"TTFT of {name} [s]"}, "type": "log"}
    return figure(traces, x=x, y={"title": {"text": "share of requests"}}, shapes=shapes)


def aligned(figures: Sequence[Figure]) -> None:
    """Gives figures that stand side by side the same horizontal axis."""
    values = [x for one in figures for trace in one["data"] for x in trace["x"] if isinstance(x, int | float)]
    if len(figures) < 2 or not values:
        return
    low, high = min(values), max(values)
    for one in figures:
        log = one["layout"]["xaxis"].get("type") == "log"
        one["layout"]["xaxis"]["range"] = [np.log10(low), np.log10(high)] if log and low > 0 else [low, high]


def measured(result: Result) -> Columns:
    """The requests that figures are over."""
    requests = result.tables["requests"]
    rows = requests.get("measured", np.ones(len(requests["id"]), dtype=bool))
    return {name: column[rows] for name, column in requests.items()}


def distribution(values: Array, among: int) -> tuple[Array, Array]:
    """The values that some hundreds of shares of `among` have; all of the largest hundred."""
    ordered = np.sort(np.maximum(values, 1e-9))
    spread = np.linspace(0, len(ordered) - 1, POINTS - 100)
    places = np.unique(np.append(spread.astype(np.int64), np.arange(max(0, len(ordered) - 100), len(ordered))))
    return ordered[places], (places + 1) / among


def figure(traces: Sequence[Figure], *, x: Figure, y: Figure, height: int = 340, **layout: Any) -> Figure:
    """A figure; without traces it says that there is nothing to show."""
    made = {"xaxis": {**x, **_ticks(x, traces)}, "yaxis": y, "height": height, "showlegend": True, **layout}
    if not traces:
        nothing = {"text": "nothing to show", "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}
        made["annotations"] = [nothing]
    return {"data": list(traces), "layout": made}


def _ticks(x: Figure, traces: Sequence[Figure]) -> Figure:
    """Labels of a logarithmic axis that neither crowd nor run out: every digit, 1 2 5, or powers of ten."""
    values = [value for trace in traces for value in trace["x"] if isinstance(value, int | float) and value > 0]
    if x.get("type") != "log" or not values:
        return {}
    decades = float(np.log10(max(values) / min(values)))
    return {"dtick": "D1" if decades < 0.8 else "D2" if decades < 3 else 1}


def line(
    x: Array,
    y: Array,
    name: str,
    colour: int,
    *,
    dash: str | None = None,
    shape: str = "linear",
    group: str | None = None,
) -> Figure:
    """One line; without a `dash` it has that of its colour's place."""
    style = {"dash": dash or DASHES[colour % len(DASHES)], "shape": shape, "width": 1.8}
    made = {"type": "scatter", "mode": "lines", "x": rounded(x), "y": rounded(y), "name": plain(name), "line": style}
    return {**made, "colour": colour, **({"legendgroup": group} if group else {})}


def slo_mark(slo_s: float, met: float, told: str, colour: int, group: str) -> Figure:
    """The dotted line under a distribution's value at the SLO."""
    return {
        "type": "scatter", "mode": "lines+markers", "x": [slo_s, slo_s], "y": [0, met], "colour": colour,
        "name": plain(told), "legendgroup": group, "showlegend": False,
        "hovertemplate": f"{plain(told)}<extra></extra>",
        "line": {"dash": "dot", "width": 1},
        "marker": {"size": [0, 9], "symbol": "circle-open-dot", "line": {"width": 2}},
    }  # fmt: skip


def vertical(at: float, yref: str, text: str) -> Figure:
    """A line over the whole height of a panel."""
    span = {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": yref, "line": {"dash": "dot", "width": 1.5}}
    label = {"text": text, "textposition": "end", "textangle": 0, "xanchor": "left", "yanchor": "top"}
    return {**span, "label": {**label, "font": {"size": 11}}}


def panel(number: int, trace: Figure) -> Figure:
    """A trace moved to a panel below the first."""
    return {**trace, "yaxis": f"y{number}", "legend": f"legend{number}"}


def axis_name(letter: str, number: int) -> str:
    """`yaxis`, `yaxis2`, ..."""
    return f"{letter}axis{number if number > 1 else ''}"


def row_domain(row: int, rows: int, gap: float = 0.04) -> list[float]:
    """The part of the height that a row has, counted from below."""
    height = (1 - gap * (rows - 1)) / rows
    return [round(row * (height + gap), 4), round(row * (height + gap) + height, 4)]


def rounded(values: Array) -> list[float | None]:
    """Six digits of each value, None for NaN: what JSON can hold."""
    return [
        None if value != value else float(f"{value:.6g}") for value in np.asarray(values, dtype=np.float64).tolist()
    ]


def plain(name: str) -> str:
    """A name as plotly shows it letter by letter, not as markup."""
    return name.replace("&", "&amp;").replace("<", "&lt;")


def _asked(run: Mapping[str, Any]) -> int:
    """Instances that requests are sent to: all but those of pools that only decode."""
    pools = run["pools"]
    decoding = {pool.get("decode") for pool in pools.values()}
    return sum(pool["instances"][1] - pool["instances"][0] + 1 for name, pool in pools.items() if name not in decoding)


def _attainment(requests: Columns, classes: Sequence[str]) -> list[Figure]:
    """The share that met its SLO of those that arrived in a stretch of time, by class."""
    has_slo = np.isfinite(requests["ttft_slo_s"])
    if not has_slo.any():
        return []
    bins = int(np.clip(has_slo.sum() / 40, 4, 60))
    edges_s = np.linspace(0.0, max(float(requests["arrival_s"].max()), 1e-9), bins + 1)
    traces = []
    for place, name in enumerate(classes):
        rows = has_slo & (requests["slo_class"] == name)
        asked, _ = np.histogram(requests["arrival_s"][rows], edges_s)
        met, _ = np.histogram(requests["arrival_s"][rows & (requests["met_slo"] == True)], edges_s)  # noqa: E712
        if rows.any():
            share = np.where(asked > 0, met / np.maximum(asked, 1), np.nan)
            trace = line((edges_s[:-1] + edges_s[1:]) / 2, share, f"{name} attained", place)
            traces.append({**trace, "mode": "lines+markers", "marker": {"size": 4}})
    return traces


def _kv(table: Columns, blocks: Sequence[int], edges_s: Array) -> list[Figure]:
    """The mean shares of all KV blocks that running and suspended requests hold."""
    held, parked = np.zeros(len(edges_s) - 1), np.zeros(len(edges_s) - 1)
    for instance, total in enumerate(blocks):
        rows = table["instance"] == instance
        t_s = table["t_s"][rows]
        held += means(Steps(t_s, total - table["free_blocks"][rows]), edges_s)
        parked += means(Steps(t_s, table["suspended_blocks"][rows]), edges_s)
    at_s, total = (edges_s[:-1] + edges_s[1:]) / 2, sum(blocks)
    return [
        line(at_s, held / total, "KV held", 4, dash="solid"),
        line(at_s, parked / total, "of it suspended", 5, dash="dash"),
    ]
