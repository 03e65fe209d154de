"""One operator of a profile's file fitted from its rows of a trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from flowsim.profiler.evaluate import experts_touched, operator_seconds
from flowsim.profiler.fit import DenseFit, fit_dense, fit_experts
from flowsim.profiler.models import Shapes
from flowsim.profiler.robust import FitQuality, Floats, LeftOut
from flowsim.profiler.terms import fit_attention, fit_decode_attention, fit_mixed_attention

__all__ = ["Fitted", "fit_rows"]

DIGITS = 7
BOUNDARIES = {
    "embedding": "head",
    "residual_add": "qkv_proj",
    "input_norm": "qkv_proj",
    "qkv_gemm": "qkv_proj",
    "qk_norm": "qkv_proj",
    "rope": "qkv_proj",
    "attention": "attention",
    "o_proj_gemm": "o_proj",
    "all_reduce_attention": "o_proj",
    "post_attention_residual_add": "gate_up_proj",
    "post_attention_norm": "gate_up_proj",
    "gate_up_gemm": "gate_up_proj",
    "router_gemm": "gate_up_proj",
    "act": "down_proj",
    "down_gemm": "down_proj",
    "experts": "down_proj",
    "all_reduce_mlp": "down_proj",
    "final_norm": "tail",
    "lm_head": "tail",
    "sampler": "tail",
}
ROUTING_SHARE = 0.5
"""Rows that touch fewer than this share of the experts that uniform routing reaches are not fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """An operator's entry in the file, the rows it was fitted to, and what the fit says of each of them.

    `x` is the axis of its figure: tokens, sequences, or the KV tokens of a decode.
    """

    tp: int
    entry: dict[str, Any]
    x: Floats
    latency_s: Floats
    fitted_s: Floats
    left_out: tuple[LeftOut, ...]


def fit_rows(operator: str, rows: pd.DataFrame, shapes: Shapes, note: Callable[[str], None]) -> list[Fitted]:
    """The entries of one operator at one TP degree: one, or for attention one for each regime that has rows.

    Raises:
        ValueError: too few points, or latencies that no curve can follow; names the operator.
    """
    if operator == "attention":
        return _attention(rows)
    if operator == "experts":
        return [_experts(rows, shapes, note)]
    if operator in ("lm_head", "sampler"):
        return [_per_sequence(operator, rows)]
    kind = "all_reduce" if operator.startswith("all_reduce") else "dense"
    return [_dense(operator, kind, rows)]


def _dense(operator: str, kind: str, rows: pd.DataFrame) -> Fitted:
    tokens, latency_s = rows["new_tokens"] * rows["batch"], rows["latency_s"]
    fit = _curve(operator, tuple(tokens.tolist()), tuple(latency_s.tolist()), 256)
    entry = {
        "name": operator,
        "boundary": BOUNDARIES[operator],
        "kind": kind,
        **_curve_keys(fit, "tokens", "token"),
        **_provenance(fit.quality, rows, "measured_tokens"),
    }
    fitted_s = [operator_seconds(entry, n) for n in tokens]
    return _fitted(rows, entry, tokens, fitted_s, fit.quality)


def _per_sequence(operator: str, rows: pd.DataFrame) -> Fitted:
    fit = _curve(operator, tuple(rows["sequences"].tolist()), tuple(rows["latency_s"].tolist()), 1)
    entry = {
        "name": operator,
        "boundary": BOUNDARIES[operator],
        "kind": "per_sequence",
        **_curve_keys(fit, "sequences", "sequence"),
        **_provenance(fit.quality, rows, "measured_sequences"),
    }
    fitted_s = [operator_seconds(entry, 0, sequences=n) for n in rows["sequences"]]
    return _fitted(rows, entry, rows["sequences"], fitted_s, fit.quality)


def _experts(rows: pd.DataFrame, shapes: Shapes, note: Callable[[str], None]) -> Fitted:
    tokens = rows["new_tokens"] * rows["batch"]
    expected = tokens.map(lambda n: experts_touched(shapes.experts, shapes.experts_per_token, n))
    touched = rows["experts"].where(rows["experts"] > 0, expected)
    likely = touched >= ROUTING_SHARE * expected
    if not likely.all():
        note(f"experts: {int((~likely).sum())} rows touch far fewer experts than routing does; not fitted")
        rows, tokens, touched = rows[likely], tokens[likely], touched[likely]
    fit = fit_experts("experts", tokens.tolist(), touched.tolist(), rows["latency_s"].tolist())
    entry = {
        "name": "experts",
        "boundary": BOUNDARIES["experts"],
        "kind": "experts",
        **_curve_keys(fit.curve, "tokens", "token"),
        "expert_s": _rounded(fit.expert_s),
        "experts": shapes.experts,
        "experts_per_token": shapes.experts_per_token,
        **_provenance(fit.quality, rows, "measured_tokens"),
    }
    fitted_s = [fit.seconds(n, some) for n, some in zip(tokens, touched, strict=True)]
    return _fitted(rows, entry, tokens, fitted_s, fit.quality)


def _attention(rows: pd.DataFrame) -> list[Fitted]:
    has_prefill, has_decodes = rows["new_tokens"] > 0, rows["decodes"] > 0
    found = [_prefill_attention(rows[has_prefill & ~has_decodes])]
    decode, mixed = rows[~has_prefill & has_decodes], rows[has_prefill & has_decodes]
    if not decode.empty:
        counts = [decode[name].tolist() for name in ("decodes", "decode_kv_tokens", "latency_s")]
        fit = fit_decode_attention("decode attention", *counts)
        n, kv = decode["decodes"].to_numpy(dtype=float), decode["decode_kv_tokens"].to_numpy(dtype=float)
        terms = {"1": 1.0, "n": n, "sum_kv": n * kv, "mean_kv": kv}
        found.append(_regime("decode_attention", decode, fit.coefficients, terms, fit.quality))
    if not mixed.empty:
        names = ("new_tokens", "cached_tokens", "decodes", "decode_kv_tokens", "latency_s")
        fit = fit_mixed_attention("mixed attention", *(mixed[name].tolist() for name in names))
        q, kp, n, kv = (mixed[name].to_numpy(dtype=float) for name in names[:4])
        work = q * kp + q * q / 2.0
        terms = {"1": 1.0, "q": q, "work": work, "kp": kp, "n": n, "sum_kv": n * kv, "mean_kv": kv, "nq": n * q}
        found.append(_regime("mixed_attention", mixed, fit.coefficients, terms, fit.quality))
    return found


def _prefill_attention(rows: pd.DataFrame) -> Fitted:
    single, several = rows[rows["batch"] == 1], rows[rows["batch"] > 1]
    counts = [single[name].tolist() for name in ("new_tokens", "cached_tokens", "latency_s")]
    fit = fit_attention("attention", *counts)
    entry: dict[str, Any] = {
        "name": "attention",
        "boundary": "attention",
        "kind": "attention",
        "coefficients": {name: _rounded(value) for name, value in fit.coefficients.items()},
        **({"floor_tokens": fit.floor_tokens} if fit.floor_tokens else {}),
        "assumed": list(fit.assumed),
        **_provenance(fit.quality, single, "measured_tokens"),
    }
    several = several[several["new_tokens"] * several["batch"] >= 256]
    if not several.empty:
        one_s = fit.coefficients["1"]
        alone_s = [fit.seconds(c, p) for c, p in zip(several["new_tokens"], several["cached_tokens"], strict=True)]
        summed_s = (np.asarray(alone_s) - one_s) * several["batch"].to_numpy() + one_s
        measured_s = several["latency_s"].to_numpy()
        entry["fit"]["batched_mape_core"] = _rounded(float(np.abs(summed_s / measured_s - 1.0).mean()), 4)
    fitted_s = [fit.seconds(c, p) for c, p in zip(single["new_tokens"], single["cached_tokens"], strict=True)]
    return _fitted(single, entry, single["new_tokens"] + single["cached_tokens"], fitted_s, fit.quality)


def _regime(
    name: str, rows: pd.DataFrame, coefficients: dict[str, float], terms: dict[str, Any], quality: FitQuality
) -> Fitted:
    """Decode or mixed attention: read into the profile, used by engines that run decodes."""
    entry = {
        "name": name,
        "boundary": "attention",
        "kind": name,
        "coefficients": {term: _rounded(value) for term, value in coefficients.items()},
        **_provenance(quality, rows, "measured_tokens"),
    }
    fitted_s = sum(value * terms[term] for term, value in coefficients.items())
    return _fitted(rows, entry, rows["decode_kv_tokens"], fitted_s, quality)


@lru_cache(maxsize=256)
def _curve(operator: str, counts: tuple[int, ...], latency_s: tuple[float, ...], core: int) -> DenseFit:
    return fit_dense(operator, counts, latency_s, core=core)


def _curve_keys(fit: DenseFit, many: str, one: str) -> dict[str, Any]:
    return {
        "constant_s": _rounded(fit.constant_s),
        f"knots_{many}": list(fit.knots_tokens),
        f"slopes_s_per_{one}": [_rounded(slope) for slope in fit.slopes_s_per_token],
    }


def _provenance(quality: FitQuality, rows: pd.DataFrame, range_key: str) -> dict[str, Any]:
    """The measured range, how good the fit is, and where the times are from; an estimate has no error to report."""
    sources = list(dict.fromkeys(rows["source"]))
    found: dict[str, Any] = {range_key: list(quality.measured_tokens)}
    if all(source.startswith("estimated") for source in sources):
        found["estimated"] = True
    else:
        found["fit"] = {"points": quality.points, "heldout_mape": _rounded(quality.heldout_mape, 4)}
        if not math.isnan(quality.heldout_mape_core):
            found["fit"]["heldout_mape_core"] = _rounded(quality.heldout_mape_core, 4)
        found["fit"]["heldout_max_error"] = _rounded(quality.heldout_max_error, 4)
        found["fit"] |= {"r2": _rounded(quality.r2, 6), "left_out": len(quality.left_out)}
    found["source"] = "; ".join(sources)
    return found


def _fitted(rows: pd.DataFrame, entry: dict[str, Any], x: Any, fitted_s: Any, quality: FitQuality) -> Fitted:
    return Fitted(
        tp=int(rows["tp"].iloc[0]),
        entry=entry,
        x=np.asarray(x, dtype=np.float64),
        latency_s=rows["latency_s"].to_numpy(dtype=np.float64),
        fitted_s=np.asarray(fitted_s, dtype=np.float64),
        left_out=quality.left_out,
    )


def _rounded(value: float, digits: int = DIGITS) -> float:
    return float(f"{value:.{digits}g}")
