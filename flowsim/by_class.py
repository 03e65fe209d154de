"""The table of a run by class, as words: what the terminal and Jupyter show. Knows neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flowsim.log import Columns
from flowsim.summary import statistics

__all__ = ["ATTAINED", "class_table"]

ATTAINED = 3  # the column
_FRONT = ("class", "requests", "SLO s", "attained")
_TTFT = ("TTFT mean", "p50", "p90", "p99 s")
_DECODED = ("TTFT p50", "p99 s", "TBT p50", "p99 s", "joint")


def class_table(requests: Columns, figures: Mapping[str, Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    """The header, and a row per class and one for all, over the requests that are measured.

    Where tokens were decoded, the TBT of a request is their mean, and `joint` the share of requests that met both SLOs.

    Args:
        requests: the result's table.
        figures: its summary.
    """
    measured = {name: cells[requests["measured"]] for name, cells in requests.items()}
    rows = []
    for name in figures["ttft_s_by_class"]:
        chosen = measured["slo_class"] == name
        shares = [figures[f"{of}attainment_by_class"][name] for of in ("", "joint_")]
        of_class = {name: cells[chosen] for name, cells in measured.items()}
        rows.append([name, *_cells(of_class, _slos(of_class["ttft_slo_s"]), *shares)])
    rows.append(["all", *_cells(measured, "", figures["attainment"], figures["joint_attainment"])])
    return (*_FRONT, *(_DECODED if "tbt_mean_s" in measured else _TTFT), "paused"), rows


def _cells(requests: Columns, slo: str, attained: float | None, joint: float | None) -> list[str]:
    """The row of some requests, behind its name."""
    ttft_s = statistics(requests["ttft_s"])
    if "tbt_mean_s" in requests:
        tbt_s = statistics(requests["tbt_mean_s"])
        figures = [_seconds(times_s[name]) for times_s in (ttft_s, tbt_s) for name in ("p50", "p99")] + [_share(joint)]
    else:
        figures = [_seconds(seconds) for seconds in ttft_s.values()]
    paused = int((requests["suspended_s"] > 0.0).sum())
    return [str(len(requests["id"])), slo, _share(attained), *figures, str(paused)]


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


def _slos(slos_s: npt.NDArray[np.float64]) -> str:
    """The SLO of a class, or the range of its requests' SLOs."""
    finite_s = sorted(set(slos_s[np.isfinite(slos_s)].tolist()))
    if not finite_s:
        return "none"
    ends_s = finite_s[:1] if len(finite_s) == 1 else [finite_s[0], finite_s[-1]]
    return "-".join(f"{slo_s:.2g}" if len(ends_s) > 1 else f"{slo_s:.3g}" for slo_s in ends_s)
