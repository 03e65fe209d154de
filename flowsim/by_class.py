"""The table of a run by class, as words: what the terminal and Jupyter show. Knows neither."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["CLASS_HEADER", "class_rows"]

CLASS_HEADER = ("class", "requests", "SLO s", "attained", "TTFT mean", "p50", "p90", "p99 s", "paused")


def class_rows(figures: Mapping[str, Any]) -> list[list[str]]:
    """A row per class and one for all, over the requests that are measured: cells for `CLASS_HEADER`.

    `figures` are a result's summary.
    """
    rows = []
    for name, ttft_s in figures["ttft_s_by_class"].items():
        count, paused = (figures[key][name] for key in ("measured_by_class", "paused_by_class"))
        slo = _slos(figures["ttft_slo_s_by_class"][name])
        rows.append([name, *_cells(count, slo, figures["attainment_by_class"][name], ttft_s, paused)])
    paused = sum(figures["paused_by_class"].values())
    return [*rows, ["all", *_cells(figures["measured"], "", figures["attainment"], figures["ttft_s"], paused)]]


def _cells(count: int, slo: str, attained: float | None, ttft_s: Mapping[str, float | None], paused: int) -> list[str]:
    """A row of the table behind its name."""
    share = "-" if attained is None else f"{attained:.2%}"
    times_s = ["-" if seconds is None else f"{seconds:.3f}" for seconds in ttft_s.values()]
    return [str(count), slo, share, *times_s, str(paused)]


def _slos(ends_s: Sequence[float] | None) -> str:
    """The SLO of a class, or the range of its requests' SLOs."""
    if ends_s is None:
        return "none"
    low_s, high_s = ends_s
    return f"{low_s:.3g}" if low_s == high_s else f"{low_s:.2g}-{high_s:.2g}"
