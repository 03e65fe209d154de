"""The table of a run by class, as words: what the terminal and Jupyter show. Knows neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flowsim.log import Columns

__all__ = ["CLASS_HEADER", "class_rows"]

CLASS_HEADER = ("class", "requests", "SLO s", "attained", "TTFT mean", "p50", "p90", "p99 s", "paused")


def class_rows(requests: Columns, figures: Mapping[str, Any]) -> list[list[str]]:
    """A row per class and one for all, over the requests that are measured: cells for `CLASS_HEADER`.

    Args:
        requests: the result's table.
        figures: its summary.
    """
    measured = {name: cells[requests["measured"]] for name, cells in requests.items()}
    rows = []
    for name, ttft_s in figures["ttft_s_by_class"].items():
        chosen = measured["slo_class"] == name
        attained = figures["attainment_by_class"][name]
        rows.append([name, *_cells(measured, chosen, _slos(measured["ttft_slo_s"][chosen]), attained, ttft_s)])
    every = np.ones(len(measured["id"]), dtype=bool)
    return [*rows, ["all", *_cells(measured, every, "", figures["attainment"], figures["ttft_s"])]]


def _cells(
    requests: Columns, rows: npt.NDArray[np.bool_], slo: str, attained: float | None, ttft_s: Mapping[str, float | None]
) -> list[str]:
    """A row of the table behind its name."""
    paused = int((requests["suspended_s"][rows] > 0.0).sum())
    share = "-" if attained is None else f"{attained:.2%}"
    times_s = ["-" if seconds is None else f"{seconds:.3f}" for seconds in ttft_s.values()]
    return [str(int(rows.sum())), slo, share, *times_s, str(paused)]


def _slos(slos_s: npt.NDArray[np.float64]) -> str:
    """The SLO of a class, or the range of its requests' SLOs."""
    finite_s = sorted(set(slos_s[np.isfinite(slos_s)].tolist()))
    if not finite_s:
        return "none"
    ends_s = finite_s[:1] if len(finite_s) == 1 else [finite_s[0], finite_s[-1]]
    return "-".join(f"{slo_s:.2g}" if len(ends_s) > 1 else f"{slo_s:.3g}" for slo_s in ends_s)
