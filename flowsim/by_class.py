"""The table of a run by class, as words: what the terminal and Jupyter show. Knows neither."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ATTAINED", "class_table"]

ATTAINED = 3  # the column
_FRONT = ("class", "requests", "SLO s", "attained")
_FIGURES = ("attainment", "joint_attainment", "ttft_s", "tbt_mean_s")
_TTFT = ("TTFT mean", "p50", "p90", "p99 s")
_DECODED = ("TTFT p50", "p99 s", "TBT p50", "p99 s", "joint")


def class_table(figures: Mapping[str, Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    """The header, and a row per class and one for all, over the requests that are measured; `figures` are the summary.

    Where tokens were decoded, the TBT of a request is their mean, and `joint` the share of requests that met both SLOs.
    """
    columns = _TTFT if figures["decode"] is None else _DECODED
    rows = []
    for name in figures["ttft_s_by_class"]:
        of_class = {key: figures[f"{key}_by_class"][name] for key in (*_FIGURES, "measured", "paused")}
        rows.append([name, *_cells(of_class, _slos(figures["ttft_slo_s_by_class"][name]), columns)])
    of_all = {key: figures[key] for key in (*_FIGURES, "measured")}
    of_all["paused"] = sum(figures["paused_by_class"].values())
    rows.append(["all", *_cells(of_all, "", columns)])
    return (*_FRONT, *columns, "paused"), rows


def _cells(figures: Mapping[str, Any], slo: str, columns: tuple[str, ...]) -> list[str]:
    """The row of some requests, behind its name."""
    ttft_s, tbt_s = figures["ttft_s"], figures["tbt_mean_s"]
    if columns is _DECODED:
        times = [_seconds(of_all[name]) for of_all in (ttft_s, tbt_s) for name in ("p50", "p99")]
        times.append(_share(figures["joint_attainment"]))
    else:
        times = [_seconds(seconds) for seconds in ttft_s.values()]
    return [str(figures["measured"]), slo, _share(figures["attainment"]), *times, str(figures["paused"])]


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


def _slos(ends_s: Sequence[float] | None) -> str:
    """The SLO of a class, or the range of its requests' SLOs."""
    if ends_s is None:
        return "none"
    low_s, high_s = ends_s
    return f"{low_s:.3g}" if low_s == high_s else f"{low_s:.2g}-{high_s:.2g}"
