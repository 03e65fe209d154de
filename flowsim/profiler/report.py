"""The report of a fit: a table of errors, a figure for each operator, and directly measured totals beside the sums.

Writes files; prints nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flowsim.profiler.entries import Fitted
from flowsim.profiler.evaluate import layer_seconds, pass_seconds

__all__ = ["totals", "write_report"]

HEAD = """\
# Fit of {model} on {gpu}

Errors are of points held out (five folds, pieces and knots chosen without the fold), as shares of the measured
latency. The core is what decides a prefill: from 256 tokens on; for decode and mixed attention 16 decodes or more
with 256 to 4096 tokens each. Estimated operators have no error: nothing was measured.

| TP | operator | points | pieces | mean error | of the core | largest error | R2 | left out | source |
|--:|---|--:|--:|--:|--:|--:|--:|--:|---|
"""


def write_report(profile: Mapping[str, Any], fits: Sequence[Fitted], trace: pd.DataFrame, folder: Path) -> None:
    """Writes `report.md` and a PNG for each operator and TP degree into the folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [HEAD.format(model=profile["model"], gpu=profile["gpu"]) + "\n".join(map(_row, fits)), ""]
    out = [_left_out(one) for one in fits if one.left_out]
    lines += ["## Points left out", "", *(out or ["None."]), "", "## Directly measured totals", ""]
    checks = totals(profile, trace)
    lines += [_totals_table(checks) if not checks.empty else "The trace has no `whole_...` rows to compare with.", ""]
    lines += ["## Figures", ""]
    for one in fits:
        name = f"tp{one.tp}_{one.entry['name']}.png"
        _figure(one, folder / name)
        lines.append(f"![TP {one.tp}, {one.entry['name']}]({name})")
    (folder / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def totals(profile: Mapping[str, Any], trace: pd.DataFrame) -> pd.DataFrame:
    """Each directly measured total (`whole_prefill`, `whole_layer`) of one sequence beside the profile's sum.

    Columns tp, operator, new_tokens, cached_tokens, measured_s, fitted_s, error (a share of the measured).
    """
    rows = trace[trace["operator"].isin(["whole_prefill", "whole_layer"]) & (trace["batch"] == 1)]
    columns = ["tp", "operator", "new_tokens", "cached_tokens"]
    found = rows.groupby(columns)["latency_s"].median().rename("measured_s").reset_index()
    found["fitted_s"] = [_sum(profile, row) for row in found.to_dict("records")]
    return found.assign(error=found["fitted_s"] / found["measured_s"] - 1.0)


def _sum(profile: Mapping[str, Any], row: Mapping[Any, Any]) -> float:
    summed = pass_seconds if row["operator"] == "whole_prefill" else layer_seconds
    return summed(profile, row["tp"], row["new_tokens"], row["cached_tokens"], _is_local)


def _is_local(entry: Mapping[str, Any]) -> bool:
    """Whether an operator runs on one rank alone, as in a total that was measured on one GPU."""
    return bool(entry["kind"] != "all_reduce")


def _row(one: Fitted) -> str:
    entry = one.entry
    fit = entry.get("fit")
    slopes = entry.get("slopes_s_per_token") or entry.get("slopes_s_per_sequence") or entry["coefficients"]
    shape = f"{len(slopes)} terms" if "coefficients" in entry else str(len(slopes))
    if fit is None:
        return f"| {one.tp} | {entry['name']} | {one.x.size} | {shape} | estimated | | | | | {entry['source']} |"
    core = fit.get("heldout_mape_core")
    return (
        f"| {one.tp} | {entry['name']} | {fit['points']} | {shape} | {_percent(fit['heldout_mape'])} "
        f"| {_percent(core) if core is not None else ''} | {_percent(fit['heldout_max_error'])} | {fit['r2']:.4f} "
        f"| {fit['left_out']} | {entry['source']} |"
    )


def _left_out(one: Fitted) -> str:
    return "\n".join(
        f"- TP {one.tp}, {one.entry['name']}, at {out.tokens}: {1e6 * out.latency_s:.1f} us measured, "
        f"{1e6 * out.expected_s:.1f} us fitted"
        for out in one.left_out
    )


def _totals_table(checks: pd.DataFrame) -> str:
    head = "| TP | total | new tokens | cached tokens | measured, ms | sum of operators, ms | error |"
    rows = [
        f"| {row['tp']} | {row['operator']} | {row['new_tokens']} | {row['cached_tokens']} "
        f"| {1e3 * row['measured_s']:.3f} | {1e3 * row['fitted_s']:.3f} | {100 * row['error']:+.1f} % |"
        for row in checks.to_dict("records")
    ]
    errors = checks["error"].abs()
    foot = f"\nMean error {_percent(float(errors.mean()))}, largest {_percent(float(errors.max()))}."
    return "\n".join([head, "|--:|---|--:|--:|--:|--:|--:|", *rows, foot])


def _figure(one: Fitted, path: Path) -> None:
    """Data and fit above, residuals below; black and grey, told apart by marks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    order = np.argsort(one.x, kind="stable")
    x, measured_ms, fitted_ms = one.x[order], 1e3 * one.latency_s[order], 1e3 * one.fitted_s[order]
    above.loglog(x, measured_ms, "o", color="0.6", markersize=4, label="measured")
    style = "k-" if np.unique(x).size == x.size else "k."
    above.loglog(x, fitted_ms, style, linewidth=1.2, markersize=3, label="fit")
    above.set_ylabel("latency, ms")
    above.set_title(f"{one.entry['name']}, TP {one.tp}", fontsize=10)
    above.legend(frameon=False)
    below.axhline(0.0, color="0.6", linewidth=0.8)
    below.semilogx(x, 100 * (fitted_ms / measured_ms - 1.0), "k.", markersize=4)
    below.set_ylabel("fit - data, %")
    below.set_xlabel(_axis(one.entry))
    figure.savefig(path, dpi=100)


def _axis(entry: Mapping[str, Any]) -> str:
    if entry["kind"] == "per_sequence":
        return "sequences"
    if entry["kind"] in ("decode_attention", "mixed_attention"):
        return "KV tokens of each decode"
    return "context, tokens" if entry["kind"] == "attention" else "tokens"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
