"""Fits Llama-3-8B on A100 GPUs (TP 1, 2 and 4) and writes profiles/llama3-8b/a100.yaml.

    python -m experiments.fit_llama3_8b_a100

Reads the measured tables in the folder that FLOWSIM_DATA names (default `../shared/data`, from the checkout):
GEMMs, attention and all-reduces from aiconfigurator, element-wise operators and the embedding from Vidur. The
same data give the same bytes.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from flowsim.profiler.fit import AttentionFit, DenseFit, FitQuality, fit_attention_without_prefix, fit_dense

CHECKOUT = Path(__file__).resolve().parents[1]
PROFILE = CHECKOUT / "profiles" / "llama3-8b" / "a100.yaml"

GEMM_TABLE = "aic_a100_sxm_gemm_bf16.csv.gz"
ATTENTION_TABLE = "aic_a100_sxm_context_attention_bf16_hd128.csv.gz"
ALL_REDUCE_TABLE = "aic_a100_sxm_allreduce.csv"
ELEMENTWISE_TABLE = "vidur_a100_llama3_8b_ops_median.csv"
ALL_REDUCE_CHECK_TABLE = "vidur_a100_dgx_all_reduce_median.csv"  # compared with, not fitted
TABLES = (GEMM_TABLE, ATTENTION_TABLE, ALL_REDUCE_TABLE, ELEMENTWISE_TABLE, ALL_REDUCE_CHECK_TABLE)
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

TP_DEGREES = (1, 2, 4)
GATE_UP_N = {1: (16384, 12288), 2: (12288, 2048), 4: (7168,)}  # measured n that add up to 28672 / tp
DOWN_K = {1: (12288, 16384), 2: (7168,), 4: (3584,)}  # measured k whose mean is 14336 / tp

# vLLM takes its custom all-reduce for messages below this (its default; it has no other limit for an A100) and
# NCCL from there on. The table's custom rows from 8 MiB on are that fallback: NCCL's times in graph mode, 11 to
# 22 % more in eager mode, as an extra copy of the message would be. NCCL's own rows are taken.
CUSTOM_ALL_REDUCE_BYTES = 8 * 2**20
TOKEN_BYTES = 2 * SHAPES["hidden_size"]  # of an all-reduce: the bf16 hidden state of one token

COMPUTE = ("dense", "attention")  # kinds of operators without communication
KINDS = (*COMPUTE, "all_reduce")

ONE_LINE = ("shapes", "overheads", "tp")  # keys whose innermost lists and mappings are written on one line

HEADER = """\
# Written by: python -m experiments.fit_llama3_8b_a100
# Llama-3-8B, bf16, on 1, 2 or 4 A100-SXM4-80GB of one node. Seconds and tokens; fit errors are fractions and
#   held out (5 folds, knots chosen without the fold). The first word of an operator's `source` is a key of
#   `sources`. The operators under a TP degree are those of one rank.
# weights_bytes: 2 bytes x 8,030,261,248 parameters, from the shapes: input and output embedding, 32 layers of
#   qkv, o, gate, up and down matrices and two norms, and the final norm.
# max_context_tokens: llama3.1-8b has the same shapes and shares this profile, so prompts are not limited to
#   the 8192 tokens of llama-3; an operator's `measured_tokens` says how far it was measured.
# Boundaries: head and tail run once per pass, the others once per layer, in this order. lm_head and sampling
#   have no operator here: they are part of `pass_s`.
# all_reduce: of tokens x 8192 bytes, fitted on messages of one token and more, against tokens. vLLM's custom
#   all-reduce, eager (the real FlowPrefill run is eager), below 8 MiB = 1024 tokens; NCCL from there on, as in
#   vLLM. The all-reduce of a sharded embedding, one a pass, is left out.
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
        "tp": {tp: {"operators": _operators(data, tp)} for tp in TP_DEGREES},
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


def pass_seconds(
    profile: Mapping[str, Any],
    new_tokens: int,
    cached_tokens: int = 0,
    tp: int = 1,
    kinds: Collection[str] = KINDS,
) -> float:
    """Operators of one pass, of these kinds: all layers, head and tail, no overheads."""
    once = sum(
        operator_seconds(entry, new_tokens, cached_tokens)
        for entry in profile["tp"][tp]["operators"]
        if entry["boundary"] in ("head", "tail") and entry["kind"] in kinds
    )
    return once + profile["shapes"]["layers"] * layer_seconds(profile, new_tokens, cached_tokens, tp, kinds)


def layer_seconds(
    profile: Mapping[str, Any],
    new_tokens: int,
    cached_tokens: int = 0,
    tp: int = 1,
    kinds: Collection[str] = KINDS,
) -> float:
    """Operators of one layer, of these kinds."""
    return sum(
        operator_seconds(entry, new_tokens, cached_tokens)
        for entry in profile["tp"][tp]["operators"]
        if entry["boundary"] not in ("head", "tail") and entry["kind"] in kinds
    )


def operator_seconds(entry: Mapping[str, Any], new_tokens: int, cached_tokens: int = 0) -> float:
    """One call of an operator of the profile."""
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


def _operators(data: Path, tp: int) -> list[dict[str, Any]]:
    """The operators of one rank in the order in which a pass runs them."""
    gemms = pd.read_csv(data / GEMM_TABLE)
    elementwise = pd.read_csv(data / ELEMENTWISE_TABLE)
    aic = "aiconfigurator"

    def vidur(name: str, boundary: str, column: str) -> dict[str, Any]:
        return _dense(name, boundary, _elementwise(elementwise, column, tp), "vidur")

    residual_add = vidur("residual_add", "qkv_proj", "add_ms")
    input_norm = vidur("input_norm", "qkv_proj", "input_layernorm_ms")
    return [
        vidur("embedding", "head", "emb_ms"),
        residual_add,
        input_norm,
        _dense("qkv_gemm", "qkv_proj", _gemm(gemms, 6144 // tp, 4096), aic),
        vidur("rope", "qkv_proj", "attn_rope_ms"),
        _attention(data, tp),
        _dense("o_proj_gemm", "o_proj", _gemm(gemms, 4096, 4096 // tp), aic),
        *_all_reduce(data, tp, "all_reduce_attention", "o_proj"),
        _again(residual_add, name="post_attention_residual_add", boundary="gate_up_proj"),
        vidur("post_attention_norm", "gate_up_proj", "post_attention_layernorm_ms"),
        _gate_up(gemms, tp),
        vidur("act", "down_proj", "mlp_act_ms"),
        _down(gemms, tp),
        *_all_reduce(data, tp, "all_reduce_mlp", "down_proj"),
        _again(input_norm, name="final_norm", boundary="tail", source="vidur (the curve of input_norm)"),
    ]


def _again(entry: Mapping[str, Any], **changes: str) -> dict[str, Any]:
    """Another operator with the same curve; a deep copy, since YAML writes shared lists as references."""
    return {**copy.deepcopy(dict(entry)), **changes}


def _gate_up(gemms: pd.DataFrame, tp: int) -> dict[str, Any]:
    """n = 28672 / tp, as the sum of measured GEMMs where that is not a grid point."""
    parts = GATE_UP_N[tp]
    latency_s = sum((_gemm(gemms, n, 4096) for n in parts[1:]), _gemm(gemms, parts[0], 4096))
    added = f" ({' and '.join(f'n = {n}' for n in parts)}, added)" if len(parts) > 1 else ""
    return _dense("gate_up_gemm", "gate_up_proj", latency_s, f"aiconfigurator{added}")


def _down(gemms: pd.DataFrame, tp: int) -> dict[str, Any]:
    """k = 14336 / tp, half-way between two measured GEMMs where that is not a grid point."""
    parts = DOWN_K[tp]
    latency_s = sum((_gemm(gemms, 4096, k) for k in parts[1:]), _gemm(gemms, 4096, parts[0])) / len(parts)
    between = f" (half-way between {' and '.join(f'k = {k}' for k in parts)})" if len(parts) > 1 else ""
    return _dense("down_gemm", "down_proj", latency_s, f"aiconfigurator{between}")


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


def _elementwise(table: pd.DataFrame, column: str, tp: int) -> pd.Series:
    """Seconds of one of Vidur's operators on one rank, by tokens."""
    rows = table[table["tp"] == tp]
    if rows.empty or column not in rows:
        raise ValueError(f"{ELEMENTWISE_TABLE}: no rows with tp = {tp} and a column {column}.")
    return rows.set_index("num_tokens")[column].sort_index() / 1e3


def _all_reduce(data: Path, tp: int, name: str, boundary: str) -> list[dict[str, Any]]:
    """The all-reduce that ends a block, as a list of one; a single GPU has none."""
    if tp == 1:
        return []
    source = "aiconfigurator (vLLM custom all-reduce, eager, below 8 MiB; NCCL from 8 MiB on)"
    return [_dense(name, boundary, _all_reduce_seconds(data, tp), source, kind="all_reduce")]


def _all_reduce_seconds(data: Path, tp: int) -> pd.Series:
    """Seconds of an all-reduce over `tp` GPUs, by tokens; messages below one token are left out."""
    table = pd.read_csv(data / ALL_REDUCE_TABLE)
    fits_custom = table["message_bytes"] < CUSTOM_ALL_REDUCE_BYTES
    rows = table[
        (table["num_gpus"] == tp)
        & (table["message_bytes"] >= TOKEN_BYTES)
        & (table["source"] == fits_custom.map({True: "vLLM_custom_eager", False: "NCCL"}))
    ]
    if rows.empty:
        raise ValueError(f"{ALL_REDUCE_TABLE}: no rows of vLLM_custom_eager and NCCL with num_gpus = {tp}.")
    return rows.set_index(rows["message_bytes"] // TOKEN_BYTES)["latency_ms"].sort_index() / 1e3


def _dense(name: str, boundary: str, latency_s: pd.Series, source: str, kind: str = "dense") -> dict[str, Any]:
    fit = fit_dense(name, latency_s.index.tolist(), latency_s.tolist())
    return {
        "name": name,
        "boundary": boundary,
        "kind": kind,
        "constant_s": _rounded(fit.constant_s),
        "knots_tokens": list(fit.knots_tokens),
        "slopes_s_per_token": [_rounded(slope) for slope in fit.slopes_s_per_token],
        "measured_tokens": list(fit.quality.measured_tokens),
        "fit": _quality(fit.quality),
        "source": source,
    }


def _attention(data: Path, tp: int) -> dict[str, Any]:
    table = pd.read_csv(data / ATTENTION_TABLE)
    rows = table[
        (table["version"] == AICONFIGURATOR_VERSION)
        & (table["num_q_heads"] == SHAPES["q_heads"] // tp)
        & (table["num_kv_heads"] == SHAPES["kv_heads"] // tp)
        & (table["batch_size"] == 1)
    ].sort_values("seq_len")
    if rows.empty:
        raise ValueError(f"{ATTENTION_TABLE}: no vllm {AICONFIGURATOR_VERSION} rows with the heads of tp = {tp}.")
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
            "version": f"systems/data/a100_sxm, vLLM {AICONFIGURATOR_VERSION}, bf16; NCCL 2.27.3, half",
            "file": (
                f"{GEMM_TABLE}; {ATTENTION_TABLE} (32 / tp query heads, 8 / tp KV heads, batch 1); {ALL_REDUCE_TABLE}"
            ),
            "licence": "Apache-2.0",
        },
        "vidur": {
            "repository": "microsoft/vidur",
            "commit": "7d47513363ec",
            "file": f"data/profiling/compute/a100/meta-llama/Meta-Llama-3-8B/mlp.csv, as {ELEMENTWISE_TABLE}",
            "licence": "MIT",
        },
    }


def _print_fits(profile: Mapping[str, Any]) -> None:
    for tp in TP_DEGREES:
        print(f"TP {tp:<25} {'points':>6} {'pieces':>6} {'MAPE %':>7} {'max %':>6} {'R2':>8}   (held out)")
        for entry in profile["tp"][tp]["operators"]:
            fit = entry["fit"]
            pieces = "c, c*c" if entry["kind"] == "attention" else len(entry["slopes_s_per_token"])
            print(
                f"{entry['name']:28} {fit['points']:6d} {pieces:>6} {100 * fit['heldout_mape']:7.2f} "
                f"{100 * fit['heldout_max_error']:6.1f} {fit['r2']:8.5f}"
            )
        print()


def _print_sums(profile: Mapping[str, Any]) -> None:
    print("prefill, operators only, one pass, ms:")
    print("tokens" + "".join(f"     TP {tp}: compute all-reduce    sum" for tp in TP_DEGREES))
    for tokens in (128, 512, 2048, 8192, 16384):
        line = f"{tokens:6d}"
        for tp in TP_DEGREES:
            compute_s = pass_seconds(profile, tokens, tp=tp, kinds=COMPUTE)
            all_s = pass_seconds(profile, tokens, tp=tp)
            line += f"{1e3 * compute_s:18.1f} {1e3 * (all_s - compute_s):10.1f} {1e3 * all_s:6.1f}"
        print(line)
    two_passes = pass_seconds(profile, 8192) + pass_seconds(profile, 8192, 8192)
    print(f"{16384:6d}{1e3 * two_passes:18.1f} at TP 1 in two passes of 8192")


def _print_all_reduces(profile: Mapping[str, Any], data: Path) -> None:
    """The fit beside its points and beside Vidur's NCCL (median of its messages within 10 % of the size)."""
    table = pd.read_csv(data / ALL_REDUCE_CHECK_TABLE)
    print("\nall-reduce, us    tokens measured   fitted    Vidur  fitted/Vidur")
    for tp in TP_DEGREES[1:]:
        rows = table[(table["num_gpus"] == tp) & (table["gpus_per_node"] == tp)]
        entry = next(entry for entry in profile["tp"][tp]["operators"] if entry["kind"] == "all_reduce")
        measured_s = _all_reduce_seconds(data, tp)
        for tokens in (64, 256, 512, 1024, 2048, 4096, 8192):
            near = (rows["message_bytes"] / (tokens * TOKEN_BYTES)).between(0.9, 1.1)
            vidur_s = rows.loc[near, "latency_ms"].median() / 1e3
            fitted_s = operator_seconds(entry, tokens)
            print(
                f"TP {tp:<14d} {tokens:6d} {1e6 * measured_s[tokens]:8.1f} {1e6 * fitted_s:8.1f} {1e6 * vidur_s:8.1f}"
                f" {fitted_s / vidur_s:13.2f}"
            )


def main() -> None:
    """Fit, write the profile, print the fit tables, the whole-prefill sums and the check of the all-reduces."""
    data = data_folder()
    missing = [name for name in TABLES if not (data / name).is_file()]
    if missing:
        sys.exit(f"No {', '.join(missing)} in {data}. Set FLOWSIM_DATA to the folder of measured data.")
    profile = build_profile(data)
    PROFILE.parent.mkdir(parents=True, exist_ok=True)
    PROFILE.write_text(render(profile), encoding="utf-8")
    _print_fits(profile)
    _print_sums(profile)
    _print_all_reduces(profile, data)
    print(f"wrote {PROFILE.relative_to(CHECKOUT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
