"""Shipped profiles against measurements: errors at points left out of the fits, and whole prefills.

What a whole prefill is held against: the sum of the measured operators that were fitted (in-sample), Vidur's measured
operators (another software stack, not fitted but for the element-wise ones), splitwise-sim's measured prefills of
Llama-2-70B (the shapes of Llama-3-70B but for the vocabulary), and DistServe's fits of OPT models (other shapes, so
only by floating-point operations a second).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from flowsim import LatencyModel, load_profile
from flowsim.names import shipped
from flowsim.profile import Dense, Profile, profile_table
from flowsim.profiler.evaluate import pass_seconds
from flowsim.profiler.models import load_shapes

GEMMS = ("qkv_gemm", "o_proj_gemm", "gate_up_gemm", "down_gemm")
DECODE = "decode_attention"  # no part of a prefill
STATED_S = {2048: 0.131, 8192: 0.588}  # operators of Llama-3-8B on an A100, an independent sum of the same tables
STATED_TOLERANCE = 0.05
OPT = {"facebook/opt-13b": (40, 5120, "llama3-8b"), "facebook/opt-66b": (64, 9216, "llama3-70b")}  # layers, width


@dataclass(frozen=True)
class HeldOut:
    """Relative errors of one profile's operators at points left out of the fits: means by kind, and the worst."""

    profile: str
    tp: int
    gemms: float
    attention: float
    others: float
    worst: float
    worst_operator: str


def _file(model: str, gpu: str) -> Mapping[str, Any]:
    text = (shipped("profiles") / model / f"{gpu}.yaml").read_text(encoding="utf-8")
    parsed: Mapping[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return parsed


def held_out() -> list[HeldOut]:
    """Of every shipped profile; a profile scaled from another has the other's errors."""
    found = []
    for model, gpu, degrees in profile_table():
        profile = _file(model, gpu)
        for tp in degrees:
            entries = [one for one in profile["tp"][tp]["operators"] if "fit" in one and one["name"] != DECODE]
            errors = {one["name"]: float(one["fit"]["heldout_mape"]) for one in entries}
            others = [value for name, value in errors.items() if name not in (*GEMMS, "attention")]
            worst = max(errors, key=lambda name: errors[name])
            found.append(
                HeldOut(
                    profile=f"{model}/{gpu}",
                    tp=tp,
                    gemms=float(np.mean([errors[name] for name in GEMMS if name in errors])),
                    attention=errors["attention"],
                    others=float(np.mean(others)) if others else math.nan,
                    worst=errors[worst],
                    worst_operator=worst,
                )
            )
    return found


@dataclass(frozen=True)
class Prefill:
    """One whole prefill: measured and simulated seconds."""

    what: str
    tokens: int
    measured_s: float
    simulated_s: float

    @property
    def off(self) -> float:
        return self.simulated_s / self.measured_s - 1.0


def stated() -> list[Prefill]:
    """The operators of Llama-3-8B on an A100 against the sums that the design states."""
    profile = _file("llama3-8b", "a100")
    what = "operators, Llama-3-8B on A100"
    return [Prefill(what, tokens, sum_s, pass_seconds(profile, 1, tokens)) for tokens, sum_s in STATED_S.items()]


def sums(data: Path) -> list[Prefill]:
    """Sums of measured operators of Llama-3-8B on an A100, with the GEMMs of aiconfigurator and of Vidur."""
    profile = _file("llama3-8b", "a100")
    vidur = pd.read_csv(data / "vidur_a100_llama3_8b_ops_median.csv")
    vidur = vidur[vidur.tp == 1].set_index("num_tokens").sort_index()
    attention = pd.read_csv(data / "aic_a100_sxm_context_attention_bf16_hd128.csv.gz")
    attention = attention[(attention.batch_size == 1) & (attention.num_q_heads == 32) & (attention.num_kv_heads == 8)]
    attention_ms = attention.groupby("seq_len").latency_ms.median()
    gemm_ms = sum(measured_gemms(data).values())
    small = ["attn_rope_ms", "input_layernorm_ms", "post_attention_layernorm_ms", "mlp_act_ms", "add_ms", "add_ms"]
    theirs = ["attn_pre_proj_ms", "attn_post_proj_ms", "mlp_up_proj_ms", "mlp_down_proj_ms"]
    found = []
    for tokens in (128, 512, 1024, 2048, 4096, 8192):
        row = vidur.loc[tokens]
        rest_ms = sum(float(row[name]) for name in small) + float(attention_ms[tokens])
        once_ms = float(row.emb_ms) + float(row.input_layernorm_ms)
        for what, layer_ms in (
            ("measured operators, aiconfigurator GEMMs", gemm_ms[tokens]),
            ("measured operators, Vidur GEMMs", sum(float(row[name]) for name in theirs)),
        ):
            whole_s = 1e-3 * (once_ms + 32 * (rest_ms + layer_ms))
            found.append(Prefill(what, tokens, whole_s, pass_seconds(profile, 1, tokens)))
    return sorted(found, key=lambda one: (one.what, one.tokens))


def measured_gemms(data: Path) -> dict[str, pd.Series]:
    """The four GEMMs of one layer of Llama-3-8B on an A100, ms by tokens, composed of measured sizes: gate_up of
    16384 + 12288 columns, down between 12288 and 16384 rows."""
    table = pd.read_csv(data / "aic_a100_sxm_gemm_bf16.csv.gz")
    table = table[table.backend == "vllm"]

    def ms(n: int, k: int) -> pd.Series:
        return table[(table.n == n) & (table.k == k)].groupby("m").latency_ms.median()

    down = (ms(4096, 12288) + ms(4096, 16384)) / 2
    found = {
        "qkv_gemm": ms(6144, 4096),
        "o_proj_gemm": ms(4096, 4096),
        "gate_up_gemm": ms(16384, 4096) + ms(12288, 4096),
        "down_gemm": down,
    }
    return {name: cells.dropna() for name, cells in found.items()}


def with_measured_gemms(profile: Profile, data: Path, factor: float) -> Profile:
    """A profile of Llama-3-8B whose GEMMs at TP 1 go straight from one measured point to the next, times `factor`,
    instead of along two or three fitted lines. Where a measured time falls, the curve stays level."""
    measured = measured_gemms(data)

    def through(one: Dense) -> Dense:
        if one.name not in measured:
            return one
        tokens = measured[one.name].index.to_numpy(dtype=float)
        level_s = 1e-12 * np.arange(len(tokens))  # slopes have to be above 0
        seconds = np.maximum.accumulate(1e-3 * factor * measured[one.name].to_numpy()) + level_s
        slopes = [*(np.diff(seconds) / np.diff(tokens)), (seconds[-1] - seconds[-3]) / (tokens[-1] - tokens[-3])]
        return replace(
            one,
            constant_s=float(seconds[0]),
            knots_tokens=tuple(map(int, tokens)),
            slopes_s_per_token=(1e-15, *map(float, slopes)),
        )

    return replace(profile, dense={**profile.dense, 1: tuple(map(through, profile.dense[1]))})


def splitwise(data: Path) -> list[Prefill]:
    """Whole prefills of Llama-2-70B alone, as splitwise-sim measured them, against the idle TTFT of Llama-3-70B."""
    table = pd.read_csv(data / "splitwise_sim_perf_model_median.csv")
    table = table[(table.model == "llama2-70b") & (table.batch_size == 1) & (table.token_size == 128)]
    found = []
    for gpu, hardware in (("a100", "a100-80gb"), ("h100", "h100-80gb")):
        for tp in (4, 8):
            latency = LatencyModel(load_profile("llama3-70b", gpu), tp)
            rows = table[(table.hardware == hardware) & (table.tensor_parallel == tp)].sort_values("prompt_size")
            for tokens, ms in zip(rows.prompt_size.astype(int), rows.prompt_time_ms, strict=True):
                what = f"Llama-2-70B, {gpu.upper()}, TP {tp}"
                found.append(Prefill(what, int(tokens), 1e-3 * float(ms), latency.isolated_s(int(tokens))))
    return found


@dataclass(frozen=True)
class Throughput:
    """Useful operations a second and GPU of a prefill of 2048 tokens: another model by DistServe's fit, ours."""

    theirs: str
    ours: str
    tp: int
    theirs_tflops: float
    ours_tflops: float


def distserve(data: Path, tokens: int = 2048) -> list[Throughput]:
    """OPT models by DistServe's fitted coefficients beside Llama models of the same TP degree on an A100."""
    table = pd.read_csv(data / "distserve_a100_opt_fit_coefficients.csv")
    found = []
    for row in table.itertuples():
        layers, width, ours = OPT[str(row.model)]
        profile = load_profile(ours, "a100")
        if row.tp not in profile.tp_degrees:
            continue
        seconds = 1e-3 * (row.prefill_c0 + row.prefill_c1 * tokens + row.prefill_c2 * tokens**2)
        latency = LatencyModel(profile, int(row.tp))
        found.append(
            Throughput(
                theirs=f"{str(row.model).split('/')[-1]} ({row.engine})",
                ours=ours,
                tp=int(row.tp),
                theirs_tflops=_operations(12.0 * layers * width**2, layers, width, tokens) / seconds / row.tp / 1e12,
                ours_tflops=_llama(ours, tokens) / latency.isolated_s(tokens) / row.tp / 1e12,
            )
        )
    return found


def _operations(weights: float, layers: int, width: int, tokens: int) -> float:
    """Floating-point operations of a causal prefill: 2 a weight and token, and attention."""
    return 2.0 * weights * tokens + 2.0 * layers * width * tokens**2


def _llama(model: str, tokens: int) -> float:
    its = load_shapes(model)
    width, heads = its.hidden_size, its.q_heads + 2 * its.kv_heads
    layer = width * heads * its.head_dim + width * its.q_heads * its.head_dim + 3 * width * its.intermediate_size
    return _operations(float(layer * its.layers), its.layers, its.q_heads * its.head_dim, tokens)
