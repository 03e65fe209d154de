"""`summary.json`: the figures of a run under stable keys (README lists them)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flowsim.core import Outcome, Reason
from flowsim.log import Columns
from flowsim.totals import Totals

__all__ = ["attainment", "gpu_words", "statistics", "summarise"]

Array = npt.NDArray[Any]


def summarise(tables: Mapping[str, Columns], totals: Totals, run: Mapping[str, Any]) -> dict[str, Any]:
    """Every figure of `summary.json`; None where a figure has nothing to be computed from.

    Args:
        tables: `requests`, and those of `steps` and `failures` that there are.
        totals: of the tables of events.
        run: the figures of the run as a whole.
    """
    everyone = tables["requests"]
    requests = everyone
    if not everyone["measured"].all():
        requests = {name: cells[everyone["measured"]] for name, cells in everyone.items()}
    classes = sorted(set(requests["slo_class"].tolist()))
    by_class = {name: requests["slo_class"] == name for name in classes}
    n = len(everyone["id"])
    waited_s = requests["queued_s"] + requests["suspended_s"]
    busy_s = float(totals.busy_s.sum())
    simulated_s = _last(everyone["finish_s"], totals.last_end_s)
    return {
        "requests": n,
        "measured": int(everyone["measured"].sum()),
        "left_out": _left_out(everyone, run),
        "partial": run.get("partial", False),
        "rate_rps": arrival_rate(everyone["arrival_s"]),
        "offered_load": run["offered_load"],
        "attainment": attainment(requests),
        "attainment_by_class": {name: attainment(requests, rows) for name, rows in by_class.items()},
        "impossible": int((requests["ttft_slo_s"] < requests["isolated_s"]).sum()),
        "ttft_s": statistics(requests["ttft_s"]),
        "ttft_s_by_class": {name: statistics(requests["ttft_s"][rows]) for name, rows in by_class.items()},
        "tbt_mean_s": _statistics_of(requests, "tbt_mean_s"),
        "tbt_mean_s_by_class": {name: _statistics_of(requests, "tbt_mean_s", rows) for name, rows in by_class.items()},
        "tbt_p99_s": _statistics_of(requests, "tbt_p99_s"),
        "tbt_max_s": _statistics_of(requests, "tbt_max_s"),
        "tbt_attainment": attainment(requests, of="tbt"),
        "tbt_attainment_by_class": {name: attainment(requests, rows, of="tbt") for name, rows in by_class.items()},
        "joint_attainment": attainment(requests, of="joint"),
        "joint_attainment_by_class": {name: attainment(requests, rows, of="joint") for name, rows in by_class.items()},
        "decode": _decode(requests, tables, simulated_s),
        "measured_by_class": {name: int(rows.sum()) for name, rows in by_class.items()},
        "paused_by_class": {name: int((requests["suspended_s"][rows] > 0.0).sum()) for name, rows in by_class.items()},
        "ttft_slo_s_by_class": {name: _ends(requests["ttft_slo_s"][rows]) for name, rows in by_class.items()},
        "longest_wait_s_by_class": {name: _largest(waited_s[rows]) for name, rows in by_class.items()},
        "suspended_s": statistics(requests["suspended_s"], largest=True),
        "preemptions": _preemptions(totals, n),
        "batches": {"count": totals.batches, "multi": totals.multi, "requests_in_multi": totals.requests_in_multi},
        "gpus": sum(_gpus(pool) for pool in run["pools"].values()),
        "utilisation": busy_s / (run["instances"] * simulated_s) if simulated_s else 0.0,
        "utilisation_by_instance": _utilisation(totals, run["instances"], simulated_s),
        "pools": {name: _pool(pool, requests, totals, simulated_s) for name, pool in run["pools"].items()},
        "scheduler": {
            "decisions": run["decisions"],
            "wall_s": run["scheduler_wall_s"],
            "share": run["scheduler_wall_s"] / busy_s if busy_s else None,
        },
        "rejected": int((requests["outcome"] == Outcome.REJECTED.value).sum()),
        "rejected_by_reason": {one.value: int((requests["reason"] == one.value).sum()) for one in Reason},
        "finished": int((everyone["outcome"] == Outcome.FINISHED.value).sum()),
        "unfinished": int((requests["outcome"] == Outcome.UNFINISHED.value).sum()),
        "failures": _failures(tables),
        "migrations": _migrations(tables, requests),
        "simulated_s": simulated_s,
        "simulation_wall_s": run["simulation_wall_s"],
        "events_per_request": run["events"] / n if n else None,
        "extrapolated": int(requests["extrapolated"].sum()),
    }


def attainment(requests: Columns, rows: Array | slice = slice(None), *, of: str = "ttft") -> float | None:
    """The share of requests with an SLO that met it; rejected and unfinished ones did not.

    `of` is `ttft`, `tbt` (by its mean over a request, as DistServe has it) or `joint`: every SLO that a request has, of
    those with any. None where no request has one, and for `tbt` and `joint` where nothing was decoded.
    """
    if of != "ttft" and "met_tbt" not in requests:
        return None
    has, met = [], []
    if of in ("ttft", "joint"):
        has.append(np.isfinite(requests["ttft_slo_s"][rows]))
        met.append(requests["met_slo"][rows] == True)  # noqa: E712 (None is neither)
    if of in ("tbt", "joint"):
        has.append(np.isfinite(requests["tbt_slo_s"][rows]))
        met.append(requests["met_tbt"][rows] == True)  # noqa: E712
    has_slo = np.logical_or.reduce(has)
    if not has_slo.any():
        return None
    attained = np.logical_and.reduce([~own | good for own, good in zip(has, met, strict=True)])
    return float((attained & has_slo).sum() / has_slo.sum())


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


def _statistics_of(requests: Columns, name: str, rows: Array | slice = slice(None)) -> dict[str, float | None]:
    """Of a column that only runs with decodes have, or of nothing."""
    return statistics(requests[name][rows] if name in requests else np.empty(0))


def _decode(requests: Columns, tables: Mapping[str, Columns], simulated_s: float) -> dict[str, Any] | None:
    """What decoding did, and what KV memory made it do over; None where nothing was decoded."""
    if "steps" not in tables:
        return None
    steps, everyone = tables["steps"], tables["requests"]
    output = int(everyone["output_tokens"][everyone["outcome"] == Outcome.FINISHED.value].sum())
    number = int(steps["steps"].sum())
    return {
        "output_tokens": output,
        "output_tokens_per_s": output / simulated_s if simulated_s else 0.0,
        "steps": number,
        "mean_sequences": int((steps["steps"] * steps["decodes"]).sum()) / number,
        "evictions": int(requests["evictions"].sum()),
        "recomputed_tokens": int(requests["recomputed_tokens"].sum()),
        "cached_tokens": int(requests["cached_tokens"].sum()),
    }


def _pool(pool: Mapping[str, Any], requests: Columns, totals: Totals, simulated_s: float) -> dict[str, Any]:
    """A pool's own figures: of the requests that were sent to it, and of its GPUs."""
    (first, last), rows = pool["instances"], _sent_to(pool, requests)
    busy_s = totals.busy_s[first : last + 1]
    return {
        "instances": last - first + 1,
        "gpus": _gpus(pool),
        "gpu": pool["gpu"],
        "requests": int(rows.sum()),
        "attainment": attainment(requests, rows),
        "utilisation": float(busy_s.sum()) / (last - first + 1) / simulated_s if simulated_s else 0.0,
    }


def _failures(tables: Mapping[str, Columns]) -> dict[str, Any] | None:
    """What failures did; None where there were none."""
    if "failures" not in tables:
        return None
    failures, requests = tables["failures"], tables["requests"]
    return {
        "count": len(failures["at_s"]),
        "down_s": float((failures["until_s"] - failures["at_s"]).sum()),
        "requeued": int((requests["requeued"] > 0).sum()),
        "recomputed_tokens": int(requests["recomputed_tokens"].sum()),
    }


def gpu_words(run: Mapping[str, Any]) -> str:
    """How many GPUs of which kind a run had in all."""
    counts: Counter[str] = Counter()
    for pool in run["pools"].values():
        counts[pool["gpu"]] += _gpus(pool)
    return " and ".join(f"{count} x {gpu}" for gpu, count in counts.items())


def _migrations(tables: Mapping[str, Columns], requests: Columns) -> dict[str, int] | None:
    """What moved from one queue to another; None where nothing did."""
    if "migrations" not in tables:
        return None
    return {"count": int(requests["migrations"].sum()), "requests": int((requests["migrations"] > 0).sum())}


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


def _left_out(requests: Columns, run: Mapping[str, Any]) -> dict[str, int]:
    """Requests in no figure: of the warm-up, of the cool-down, and never arrived before the horizon."""
    warmup = requests["arrival_s"] < run["warmup_s"]
    cooldown = ~requests["measured"] & ~warmup
    return {"warmup": int(warmup.sum()), "cooldown": int(cooldown.sum()), "after_horizon": run["after_horizon"]}


def _preemptions(totals: Totals, requests: int) -> dict[str, Any]:
    blocking_s = totals.blocking_s
    return {
        "count": len(blocking_s),
        "paused": totals.paused,
        "per_request": len(blocking_s) / requests if requests else None,
        "blocking_s": statistics(blocking_s, largest=True),
    }


def _utilisation(totals: Totals, instances: int, simulated_s: float) -> list[float]:
    """The busy share of each instance, and so of each of its GPUs: a group's ranks start and stop together."""
    busy_s = totals.busy_s.tolist() + [0.0] * (instances - len(totals.busy_s))
    return [share / simulated_s if simulated_s else 0.0 for share in busy_s]


def _ends(slos_s: Array) -> list[float] | None:
    """The smallest and the largest finite SLO."""
    finite_s = slos_s[np.isfinite(slos_s)]
    return [float(finite_s.min()), float(finite_s.max())] if len(finite_s) else None


def _largest(values_s: Array) -> float | None:
    values_s = values_s[~np.isnan(values_s)]
    return float(values_s.max()) if len(values_s) else None


def _last(times_s: Array, last_s: float) -> float:
    """The latest of some times, but no earlier than another; NaN are none."""
    return max(last_s, _largest(times_s) or 0.0)
