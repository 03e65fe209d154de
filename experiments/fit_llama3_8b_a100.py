"""Fits Llama-3-8B on an A100 (TP 1) and writes profiles/llama3-8b/a100.yaml.

    python -m experiments.fit_llama3_8b_a100

Reads the measured tables in the folder that FLOWSIM_DATA names (default `../shared/data`, from the checkout):
GEMMs and attention from aiconfigurator, element-wise operators and the embedding from Vidur. The same data
give the same bytes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from flowsim.profiler.fit import AttentionFit, DenseFit, FitQuality, fit_attention_without_prefix, fit_dense

CHECKOUT = Path(__file__).resolve().parents[1]
PROFILE = CHECKOUT / "profiles" / "llama3-8b" / "a100.yaml"

GEMM_TABLE = "aic_a100_sxm_gemm_bf16.csv.gz"
ATTENTION_TABLE = "aic_a100_sxm_context_attention_bf16_hd128.csv.gz"
ELEMENTWISE_TABLE = "vidur_a100_llama3_8b_ops_median.csv"
AICONFIGURATOR_VERSION = "0.14.0"  # of the measured vLLM

SHAPES = {
    "layers": 32,
    "hidden_size": 4096,
    "q_heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}

ONE_LINE = ("shapes", "overheads", "tp")  # keys whose innermost lists and mappings are written on one line

HEADER = """\
# Written by: python -m experiments.fit_llama3_8b_a100
# Llama-3-8B, bf16, on one A100-SXM4-80GB. Seconds and tokens; fit errors are fractions and held out (5 folds,
#   knots chosen without the fold). The first word of an operator's `source` is a key of `sources`.
# weights_bytes: 2 bytes x 8,030,261,248 parameters, from the shapes: input and output embedding, 32 layers of
#   qkv, o, gate, up and down matrices and two norms, and the final norm.
# max_context_tokens: llama3.1-8b has the same shapes and shares this profile, so prompts are not limited to
#   the 8192 tokens of llama-3; an operator's `measured_tokens` says how far it was measured.
# Boundaries: head and tail run once per pass, the others once per layer, in this order. lm_head and sampling
#   have no operator here: they are part of `pass_s`.
"""


def data_folder() -> Path:
    """The folder of measured data: FLOWSIM_DATA, else `../shared/data` beside the checkout."""
    return Path(os.environ.get("FLOWSIM_DATA") or CHECKOUT / "../shared/data")


def build_profile(data: Path) -> dict[str, Any]:
    """The profile as plain data, numbers rounded to 7 digits; ValueError for rows that are missing."""
    return {
        "version": 1,
        "model": "llama3-8b",
        "gpu": "a100",
        "gpu_memory_bytes": 80 * 2**30,
        "weights_bytes": 2 * _parameters(),
        "kv_bytes_per_token": 2 * SHAPES["layers"] * SHAPES["kv_heads"] * SHAPES["head_dim"] * 2,
        "max_context_tokens": 131072,
        "shapes": dict(SHAPES),
        "overheads": {"pass_s": 0.007, "request_s": 0.0045, "check_s": 20.0e-6, "switch_s": 0.0003},
        "overheads_source": (
            "Estimated, not measured on this GPU: chosen so that operators plus about 11 ms meet the idle "
            "TTFTs of the real FlowPrefill run (Llama-3.1-8B on an A800)."
        ),
        "sources": _sources(),
        "tp": {1: {"operators": _operators(data)}},
    }


def render(profile: Mapping[str, Any]) -> str:
    """The profile as the text of its file."""
    blocks = [
        yaml.safe_dump(
            {key: value},
            sort_keys=False,
            default_flow_style=None if key in ONE_LINE else False,
            width=150,
        )
        for key, value in profile.items()
    ]
    return HEADER + "".join(blocks)


def pass_seconds(profile: Mapping[str, Any], new_tokens: int, cached_tokens: int = 0) -> float:
    """Operators of one pass at TP 1: all layers, head and tail, no overheads."""
    total = 0.0
    for entry in profile["tp"][1]["operators"]:
        repeats = 1 if entry["boundary"] in ("head", "tail") else profile["shapes"]["layers"]
        total += repeats * _operator_seconds(entry, new_tokens, cached_tokens)
    return total


def _operator_seconds(entry: Mapping[str, Any], new_tokens: int, cached_tokens: int) -> float:
    quality = FitQuality(**entry["fit"], measured_tokens=tuple(entry["measured_tokens"]))
    if entry["kind"] == "attention":
        attention = AttentionFit(coefficients=entry["coefficients"], assumed=tuple(entry["assumed"]), quality=quality)
        return attention.seconds(new_tokens, cached_tokens)
    dense = DenseFit(
        constant_s=entry["constant_s"],
        knots_tokens=tuple(entry["knots_tokens"]),
        slopes_s_per_token=tuple(entry["slopes_s_per_token"]),
        quality=quality,
    )
    return dense.seconds(new_tokens)


def _operators(data: Path) -> list[dict[str, Any]]:
    """The operators in the order in which a pass runs them."""
    gemms = pd.read_csv(data / GEMM_TABLE)
    elementwise = pd.read_csv(data / ELEMENTWISE_TABLE)
    gate_up = _gemm(gemms, 16384, 4096) + _gemm(gemms, 12288, 4096)
    down = (_gemm(gemms, 4096, 12288) + _gemm(gemms, 4096, 16384)) / 2.0  # 14336 is half-way
    aic = "aiconfigurator"
    gate_up_source = f"{aic} (n = 16384 and n = 12288, added)"
    down_source = f"{aic} (half-way between k = 12288 and k = 16384)"

    def vidur(name: str, boundary: str, column: str, source: str = "vidur") -> dict[str, Any]:
        return _dense(name, boundary, _elementwise(elementwise, column), source)

    return [
        vidur("embedding", "head", "emb_ms"),
        vidur("residual_add", "qkv_proj", "add_ms"),
        vidur("input_norm", "qkv_proj", "input_layernorm_ms"),
        _dense("qkv_gemm", "qkv_proj", _gemm(gemms, 6144, 4096), aic),
        vidur("rope", "qkv_proj", "attn_rope_ms"),
        _attention(data),
        _dense("o_proj_gemm", "o_proj", _gemm(gemms, 4096, 4096), aic),
        vidur("post_attention_residual_add", "gate_up_proj", "add_ms"),
        vidur("post_attention_norm", "gate_up_proj", "post_attention_layernorm_ms"),
        _dense("gate_up_gemm", "gate_up_proj", gate_up, gate_up_source),
        vidur("act", "down_proj", "mlp_act_ms"),
        _dense("down_gemm", "down_proj", down, down_source),
        vidur("final_norm", "tail", "input_layernorm_ms", "vidur (the curve of input_norm)"),
    ]


def _gemm(table: pd.DataFrame, n: int, k: int) -> pd.Series:
    """Seconds of a bf16 GEMM [m, k] x [k, n], by m."""
    rows = table[
        (table["backend"] == "vllm")
        & (table["version"] == AICONFIGURATOR_VERSION)
        & (table["n"] == n)
        & (table["k"] == k)
    ]
    if rows.empty:
        raise ValueError(f"{GEMM_TABLE}: no vllm {AICONFIGURATOR_VERSION} rows with n = {n}, k = {k}.")
    return rows.set_index("m")["latency_ms"].sort_index() / 1e3


def _elementwise(table: pd.DataFrame, column: str) -> pd.Series:
    """Seconds of one of Vidur's operators at TP 1, by tokens."""
    rows = table[table["tp"] == 1]
    if rows.empty or column not in rows:
        raise ValueError(f"{ELEMENTWISE_TABLE}: no rows with tp = 1 and a column {column}.")
    return rows.set_index("num_tokens")[column].sort_index() / 1e3


def _dense(name: str, boundary: str, latency_s: pd.Series, source: str) -> dict[str, Any]:
    fit = fit_dense(name, latency_s.index.tolist(), latency_s.tolist())
    return {
        "name": name,
        "boundary": boundary,
        "kind": "dense",
        "constant_s": _rounded(fit.constant_s),
        "knots_tokens": list(fit.knots_tokens),
        "slopes_s_per_token": [_rounded(slope) for slope in fit.slopes_s_per_token],
        "measured_tokens": list(fit.quality.measured_tokens),
        "fit": _quality(fit.quality),
        "source": source,
    }


def _attention(data: Path) -> dict[str, Any]:
    table = pd.read_csv(data / ATTENTION_TABLE)
    rows = table[
        (table["version"] == AICONFIGURATOR_VERSION)
        & (table["num_q_heads"] == SHAPES["q_heads"])
        & (table["num_kv_heads"] == SHAPES["kv_heads"])
        & (table["batch_size"] == 1)
    ].sort_values("seq_len")
    seconds = rows["latency_ms"] / 1e3
    fit = fit_attention_without_prefix("attention", rows["seq_len"].tolist(), seconds.tolist())
    return {
        "name": "attention",
        "boundary": "attention",
        "kind": "attention",
        "coefficients": {name: _rounded(value) for name, value in fit.coefficients.items()},
        "assumed": list(fit.assumed),
        "measured_tokens": list(fit.quality.measured_tokens),
        "fit": _quality(fit.quality),
        "source": "aiconfigurator",
    }


def _quality(quality: FitQuality) -> dict[str, Any]:
    return {
        "points": quality.points,
        "heldout_mape": _rounded(quality.heldout_mape, digits=4),
        "heldout_max_error": _rounded(quality.heldout_max_error, digits=4),
        "r2": _rounded(quality.r2, digits=6),
    }


def _rounded(value: float, digits: int = 7) -> float:
    return float(f"{value:.{digits}g}")


def _parameters() -> int:
    """Parameters of the model from its shapes: untied embeddings, no biases."""
    hidden, intermediate = SHAPES["hidden_size"], SHAPES["intermediate_size"]
    qkv = hidden * (SHAPES["q_heads"] + 2 * SHAPES["kv_heads"]) * SHAPES["head_dim"]
    o_proj = SHAPES["q_heads"] * SHAPES["head_dim"] * hidden
    layer = qkv + o_proj + 3 * hidden * intermediate + 2 * hidden
    return 2 * SHAPES["vocab_size"] * hidden + SHAPES["layers"] * layer + hidden


def _sources() -> dict[str, dict[str, str]]:
    return {
        "aiconfigurator": {
            "package": "PyPI aiconfigurator-core 0.12.0 (ai-dynamo/aiconfigurator)",
            "version": f"systems/data/a100_sxm, vLLM {AICONFIGURATOR_VERSION}, bf16",
            "file": f"{GEMM_TABLE}; {ATTENTION_TABLE} (32 query heads, 8 KV heads, batch 1)",
            "licence": "Apache-2.0",
        },
        "vidur": {
            "repository": "microsoft/vidur",
            "commit": "7d47513363ec",
            "file": f"data/profiling/compute/a100/meta-llama/Meta-Llama-3-8B/mlp.csv, as {ELEMENTWISE_TABLE} (tp 1)",
            "licence": "MIT",
        },
    }


def _print_report(profile: Mapping[str, Any]) -> None:
    print(f"{'operator':28} {'points':>6} {'pieces':>6} {'MAPE %':>7} {'max %':>6} {'R2':>8}   (held out)")
    for entry in profile["tp"][1]["operators"]:
        fit = entry["fit"]
        pieces = len(entry["slopes_s_per_token"]) if entry["kind"] == "dense" else "c, c*c"
        print(
            f"{entry['name']:28} {fit['points']:6d} {pieces:>6} {100 * fit['heldout_mape']:7.2f} "
            f"{100 * fit['heldout_max_error']:6.1f} {fit['r2']:8.5f}"
        )
    print("\nprefill, operators only, one pass:")
    for tokens in (128, 512, 2048, 8192, 16384):
        print(f"{tokens:6d} tokens {1e3 * pass_seconds(profile, tokens):8.1f} ms")
    two_passes = pass_seconds(profile, 8192) + pass_seconds(profile, 8192, 8192)
    print(f"{16384:6d} tokens {1e3 * two_passes:8.1f} ms in two passes of 8192")


def main() -> None:
    """Fit, write the profile, print the fit table and the whole-prefill sums."""
    data = data_folder()
    missing = [name for name in (GEMM_TABLE, ATTENTION_TABLE, ELEMENTWISE_TABLE) if not (data / name).is_file()]
    if missing:
        sys.exit(f"No {', '.join(missing)} in {data}. Set FLOWSIM_DATA to the folder of measured data.")
    profile = build_profile(data)
    PROFILE.parent.mkdir(parents=True, exist_ok=True)
    PROFILE.write_text(render(profile), encoding="utf-8")
    _print_report(profile)
    print(f"wrote {PROFILE.relative_to(CHECKOUT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
