"""The tables of figures on the page: a row for each figure, a column for each run, and how runs differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowsim.metrics import Result

__all__ = ["Row", "by_class", "cards", "class_table", "paired", "scheduler"]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of every run: as text, and how each run's differs from the first run's."""

    label: str
    cells: tuple[str, ...]
    changes: tuple[str, ...] = ()
    verdicts: tuple[str, ...] = ()  # "better", "worse" or "" for each change


@dataclass(frozen=True, slots=True)
class Measure:
    """How a figure is found in a summary and written; `better` is the sign of a change for the better."""

    label: str
    find: Callable[[Mapping[str, Any]], float | None]
    write: Callable[[float], str]
    better: int = 0


def seconds(value: float) -> str:
    """Three digits, with the unit that suits."""
    if value == 0 or abs(value) >= 0.9995:
        return f"{value:.4g} s"
    return f"{value * 1e3:.3g} ms" if abs(value) >= 0.9995e-3 else f"{value * 1e6:.3g} µs"


def percent(value: float) -> str:
    return f"{value:.2%}"


def count(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ")


def number(value: float) -> str:
    return f"{value:.3g}"


def per_second(value: float) -> str:
    return f"{value:.4g} /s"


CARDS = (
    Measure("SLO attainment", lambda one: one["attainment"], percent, 1),
    Measure("TTFT, mean", lambda one: one["ttft_s"]["mean"], seconds, -1),
    Measure("TTFT, p50", lambda one: one["ttft_s"]["p50"], seconds, -1),
    Measure("TTFT, p99", lambda one: one["ttft_s"]["p99"], seconds, -1),
    Measure("TBT SLO attainment", lambda one: one.get("tbt_attainment"), percent, 1),
    Measure("TTFT and TBT SLO attainment", lambda one: one.get("joint_attainment"), percent, 1),
    Measure("TBT of requests, mean", lambda one: (one.get("tbt_mean_s") or {}).get("mean"), seconds, -1),
    Measure("TBT of requests, p99", lambda one: (one.get("tbt_mean_s") or {}).get("p99"), seconds, -1),
    Measure("output tokens", lambda one: (one.get("decode") or {}).get("output_tokens_per_s"), per_second, 1),
    Measure("requests", lambda one: one["requests"], count),
    Measure("arrivals", lambda one: one["rate_rps"], per_second),
    Measure("offered load", lambda one: one["offered_load"], lambda value: f"{value:.3f}"),
    Measure("GPU utilisation", lambda one: one["utilisation"], percent),
    Measure("preemptions signalled", lambda one: one["preemptions"]["count"], count),
    Measure("of them suspended", lambda one: one["preemptions"]["paused"], count),
    Measure("blocking, mean", lambda one: one["preemptions"]["blocking_s"]["mean"], seconds, -1),
    Measure("blocking, p99", lambda one: one["preemptions"]["blocking_s"]["p99"], seconds, -1),
    Measure("rejected", lambda one: one["rejected"], count, -1),
    Measure("unfinished", lambda one: one["unfinished"], count, -1),
)

SCHEDULER = (
    Measure("decisions", lambda one: one["scheduler"]["decisions"], count),
    Measure("real time in the policy", lambda one: one["scheduler"]["wall_s"], seconds),
    Measure(
        "real time a decision",
        lambda one: (
            one["scheduler"]["wall_s"] / one["scheduler"]["decisions"] if one["scheduler"]["decisions"] else None
        ),
        seconds,
    ),
    Measure(
        "real time in the policy over busy GPU time",
        lambda one: one["scheduler"]["share"],
        lambda value: f"{value:.3%}",
    ),
    Measure("signals a request", lambda one: one["preemptions"]["per_request"], number),
    Measure("blocking, p50", lambda one: one["preemptions"]["blocking_s"]["p50"], seconds, -1),
    Measure("blocking, longest", lambda one: one["preemptions"]["blocking_s"]["max"], seconds, -1),
    Measure("suspended, mean of all requests", lambda one: one["suspended_s"]["mean"], seconds),
    Measure("suspended, longest", lambda one: one["suspended_s"]["max"], seconds),
    Measure("batches", lambda one: one["batches"]["count"], count),
    Measure("of them of two requests or more", lambda one: one["batches"]["multi"], count),
    Measure("SLO under the TTFT on an idle instance", lambda one: one["impossible"], count),
    Measure("longer than the profile was measured for", lambda one: one["extrapolated"], count),
    Measure("simulated time", lambda one: one["simulated_s"], seconds),
    Measure("real time of the simulation", lambda one: one["simulation_wall_s"], seconds),
    Measure("simulator events a request", lambda one: one["events_per_request"], number),
)


def cards(summaries: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The figures that a reader looks for first; TBT where there is any."""
    return rows_of(CARDS, summaries)


def scheduler(summaries: Sequence[Mapping[str, Any]]) -> list[Row]:
    """What the policy did and what it cost."""
    return rows_of(SCHEDULER, summaries)


def by_class(summaries: Sequence[Mapping[str, Any]], classes: Sequence[str]) -> list[Row]:
    """Attainment, median and p99 TTFT of each class."""
    return [row for name in classes for row in rows_of(_class_measures(name), summaries)]


def class_table(result: Result, summary: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """One run's classes, a row each: requests, SLO, attainment, TTFT."""
    requests = result.tables["requests"]
    rows = []
    for name in classes:
        slos_s = requests["ttft_slo_s"][requests["slo_class"] == name]
        low_s, high_s = float(slos_s.min()), float(slos_s.max())
        slo = "none" if math.isinf(low_s) else seconds(low_s) if low_s == high_s else f"{seconds(low_s)} and up"
        attained = summary["attainment_by_class"].get(name)
        times_s = [_of_class(summary, name, key) for key in ("mean", "p50", "p90", "p99")]
        told = ["–" if value is None else seconds(value) for value in times_s]
        rows.append(Row(name, (count(len(slos_s)), slo, "–" if attained is None else percent(attained), *told)))
    return {"head": ("requests", "TTFT SLO", "attained", "TTFT mean", "p50", "p90", "p99"), "rows": rows}


def paired(results: Sequence[Result], classes: Sequence[str]) -> list[Row]:
    """Request by request against the first run, for runs of one workload: what share had its first token sooner, later.

    Empty where the workloads differ, or there is one run.
    """
    first = results[0].tables["requests"]
    same = all(
        np.array_equal(first[name], one.tables["requests"][name])
        for one in results[1:]
        for name in ("arrival_s", "prompt_tokens")
    )
    if len(results) < 2 or not same:
        return []
    rows = []
    for name in classes:
        chosen = first["slo_class"] == name
        cells = []
        for one in results[1:]:
            change_s = one.tables["requests"]["ttft_s"][chosen] - first["ttft_s"][chosen]
            known = change_s[~np.isnan(change_s)]
            if not len(known):
                cells.append("–")
                continue
            sooner, later = float((known < -1e-6).mean()), float((known > 1e-6).mean())
            cells.append(f"{sooner:.1%} sooner, {later:.1%} later, mean change {signed(float(known.mean()), seconds)}")
        rows.append(Row(name, ("", *cells)))
    return rows


def rows_of(figures: Sequence[Measure], summaries: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Each figure of all runs, without those that no run has."""
    rows = []
    for one in figures:
        values = [one.find(summary) for summary in summaries]
        if all(value is None for value in values):
            continue
        changes = [_change(one, value, values[0]) for value in values[1:]]
        cells = tuple("–" if value is None else one.write(value) for value in values)
        rows.append(Row(one.label, cells, tuple(text for text, _ in changes), tuple(verdict for _, verdict in changes)))
    return rows


def signed(value: float, write: Callable[[float], str]) -> str:
    """A change with its sign; a true minus."""
    return f"+{write(value)}" if value > 0 else f"−{write(-value)}" if value < 0 else "±0"


def _change(one: Measure, value: float | None, first: float | None) -> tuple[str, str]:
    """How a figure differs from the first run's, and what to think of it."""
    if value is None or first is None:
        return "–", ""
    change = value - first
    if one.write is percent:
        text = f"{signed(change * 100, lambda points: f'{points:.2f}')} points"
    else:
        text = signed(change, one.write)
        if change and first and abs(change / first) < 10:
            text += f" ({signed(change / first, lambda share: f'{share:.1%}')})"
    sign = (change > 0) - (change < 0)
    return text, "" if not one.better or not sign else "better" if sign == one.better else "worse"


def _class_measures(name: str) -> tuple[Measure, ...]:
    return (
        Measure(f"{name}: attained", lambda one: one["attainment_by_class"].get(name), percent, 1),
        Measure(f"{name}: TTFT p50", lambda one: _of_class(one, name, "p50"), seconds, -1),
        Measure(f"{name}: TTFT p99", lambda one: _of_class(one, name, "p99"), seconds, -1),
    )


def _of_class(summary: Mapping[str, Any], name: str, key: str) -> float | None:
    found: float | None = summary["ttft_s_by_class"].get(name, {}).get(key)
    return found
