"""`summary.json`: the figures of a run under stable keys (README lists them)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flowsim.core import Outcome, Reason
from flowsim.log import Columns

__all__ = ["attainment", "summarise"]

Array = npt.NDArray[Any]


def summarise(tables: Mapping[str, Columns], run: Mapping[str, Any]) -> dict[str, Any]:
    """Every figure of `summary.json`; None where a figure has nothing to be computed from."""
    everyone, segments = tables["requests"], tables["segments"]
    requests = {name: cells[everyone["measured"]] for name, cells in everyone.items()}
    classes = sorted(set(requests["slo_class"].tolist()))
    by_class = {name: requests["slo_class"] == name for name in classes}
    n = len(everyone["id"])
    waited_s = requests["queued_s"] + requests["suspended_s"]
    busy_s = float(_busy_s(segments).sum())
    simulated_s = _last(everyone["finish_s"], segments["end_s"])
    rate_rps = arrival_rate(everyone["arrival_s"])
    gpu_s = everyone["isolated_s"] - _request_s(everyone, run)
    return {
        "requests": n,
        "measured": int(everyone["measured"].sum()),
        "left_out": _left_out(everyone, run),
        "partial": run.get("partial", False),
        "rate_rps": rate_rps,
        "offered_load": rate_rps * float(gpu_s.mean()) / run["instances"] if rate_rps is not None else None,
        "attainment": attainment(requests),
        "attainment_by_class": {name: attainment(requests, rows) for name, rows in by_class.items()},
        "impossible": int((requests["ttft_slo_s"] < requests["isolated_s"]).sum()),
        "ttft_s": statistics(requests["ttft_s"]),
        "ttft_s_by_class": {name: statistics(requests["ttft_s"][rows]) for name, rows in by_class.items()},
        "longest_wait_s_by_class": {name: _largest(waited_s[rows]) for name, rows in by_class.items()},
        "suspended_s": statistics(requests["suspended_s"], largest=True),
        "preemptions": _preemptions(tables["preemptions"], n),
        "batches": _batches(tables["batches"]),
        "gpus": sum(_gpus(pool) for pool in run["pools"].values()),
        "utilisation": busy_s / (run["instances"] * simulated_s) if simulated_s else 0.0,
        "utilisation_by_instance": _utilisation(segments, run["instances"], simulated_s),
        "pools": {name: _pool(pool, requests, segments, simulated_s) for name, pool in run["pools"].items()},
        "scheduler": {
            "decisions": run["decisions"],
            "wall_s": run["scheduler_wall_s"],
            "share": run["scheduler_wall_s"] / busy_s if busy_s else None,
        },
        "rejected": int((requests["outcome"] == Outcome.REJECTED.value).sum()),
        "rejected_by_reason": {one.value: int((requests["reason"] == one.value).sum()) for one in Reason},
        "unfinished": int((requests["outcome"] == Outcome.UNFINISHED.value).sum()),
        "simulated_s": simulated_s,
        "simulation_wall_s": run["simulation_wall_s"],
        "events_per_request": run["events"] / n if n else None,
        "extrapolated": int(requests["extrapolated"].sum()),
    }


def attainment(requests: Columns, rows: Array | slice = slice(None)) -> float | None:
    """The share of requests with a TTFT SLO that met it; rejected and unfinished ones did not."""
    has_slo = np.isfinite(requests["ttft_slo_s"][rows])
    if not has_slo.any():
        return None
    return float((requests["met_slo"][rows] == True).sum() / has_slo.sum())  # noqa: E712 (None is neither)


def arrival_rate(arrival_s: Array) -> float | None:
    """(n - 1) / (last - first arrival), in requests per second."""
    span_s = float(arrival_s[-1] - arrival_s[0]) if len(arrival_s) else 0.0
    return (len(arrival_s) - 1) / span_s if span_s > 0.0 else None


def statistics(values_s: Array, *, largest: bool = False) -> dict[str, float | None]:
    """Mean, p50, p90 and p99 (and max) of the values that are there."""
    values_s = values_s[~np.isnan(values_s)]
    names = ["mean", "p50", "p90", "p99"] + ["max"] * largest
    if not len(values_s):
        return dict.fromkeys(names)
    figures = [values_s.mean(), *np.percentile(values_s, [50, 90, 99])] + [values_s.max()] * largest
    return dict(zip(names, map(float, figures), strict=True))


def _pool(pool: Mapping[str, Any], requests: Columns, segments: Columns, simulated_s: float) -> dict[str, Any]:
    """A pool's own figures: of the requests that were sent to it, and of its GPUs."""
    (first, last), rows = pool["instances"], _sent_to(pool, requests)
    busy_s = _busy_s(segments)[(segments["instance"] >= first) & (segments["instance"] <= last)]
    return {
        "instances": last - first + 1,
        "gpus": _gpus(pool),
        "gpu": pool["gpu"],
        "requests": int(rows.sum()),
        "attainment": attainment(requests, rows),
        "utilisation": float(busy_s.sum()) / (last - first + 1) / simulated_s if simulated_s else 0.0,
    }


def _gpus(pool: Mapping[str, Any]) -> int:
    first, last = pool["instances"]
    gpus: int = (last - first + 1) * pool["tp"]
    return gpus


def _sent_to(pool: Mapping[str, Any], requests: Columns) -> Array:
    """Which requests a pool was sent."""
    first, last = pool["instances"]
    instance = np.array([-1 if one is None else one for one in requests["prefill_instance"].tolist()], dtype=np.int64)
    rows: Array = (instance >= first) & (instance <= last)
    return rows


def _request_s(requests: Columns, run: Mapping[str, Any]) -> Array:
    """What `request_s` was of each request's TTFT."""
    seconds = np.full(len(requests["id"]), run["request_s"])
    for pool in run["pools"].values():
        seconds[_sent_to(pool, requests)] = pool["request_s"]
    return seconds


def _left_out(requests: Columns, run: Mapping[str, Any]) -> dict[str, int]:
    """Requests in no figure: of the warm-up, of the cool-down, and never arrived before the horizon."""
    warmup = requests["arrival_s"] < run["warmup_s"]
    cooldown = ~requests["measured"] & ~warmup
    return {"warmup": int(warmup.sum()), "cooldown": int(cooldown.sum()), "after_horizon": run["after_horizon"]}


def _preemptions(table: Columns, requests: int) -> dict[str, Any]:
    count = len(table["paused"])
    return {
        "count": count,
        "paused": int(table["paused"].sum()),
        "per_request": count / requests if requests else None,
        "blocking_s": statistics(table["stopped_s"] - table["flagged_s"], largest=True),
    }


def _batches(table: Columns) -> dict[str, int]:
    members = np.bincount(table["batch"]) if len(table["batch"]) else np.zeros(0, dtype=np.int64)
    multi = members[members > 1]
    return {"count": len(members), "multi": len(multi), "requests_in_multi": int(multi.sum())}


def _busy_s(segments: Columns) -> Array:
    """Seconds for which each segment kept its instance's GPUs, taking over and meeting at its stop included."""
    busy_s: Array = segments["end_s"] - segments["start_s"] + segments["switch_s"] + segments["barrier_s"]
    return busy_s


def _utilisation(segments: Columns, instances: int, simulated_s: float) -> list[float]:
    """The busy share of each instance, and so of each of its GPUs: a group's ranks start and stop together."""
    busy_s = np.bincount(segments["instance"], weights=_busy_s(segments), minlength=instances)
    return [float(share) for share in busy_s / simulated_s] if simulated_s else [0.0] * instances


def _largest(values_s: Array) -> float | None:
    values_s = values_s[~np.isnan(values_s)]
    return float(values_s.max()) if len(values_s) else None


def _last(*columns_s: Array) -> float:
    """The latest time in any of the columns; 0 where there is none."""
    times_s = np.concatenate(columns_s)
    times_s = times_s[~np.isnan(times_s)]
    return float(times_s.max()) if len(times_s) else 0.0
