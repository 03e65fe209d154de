"""Layered prefill against chunked prefill in an engine that decodes, for `docs/beyond.md`.

On a mixture of experts and on a dense model, both on an H100, and beside what its authors measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import flowsim
from flowsim import LatencyModel, Result, load_profile
from flowsim.latency import Decodes
from flowsim.tokens import token_times_s

__all__ = ["STUDIES"]

Overrides = dict[str, Any]

JOBS = 2
SEEDS = (0, 1, 2)
NUM_REQUESTS = 1000
GOODPUT_REQUESTS = 300
MOE, DENSE = "Qwen3-30B-A3B (128 experts)", "Llama-3-8B (dense)"
MODELS = {MOE: "qwen3-30b-a3b", DENSE: "llama3-8b"}
MEAN_TOKENS = 9194  # of the arXiv prompts of the paper's evaluation
DOCUMENTS: Overrides = {
    "workload": "lognormal",
    "workload.mean_tokens": MEAN_TOKENS,
    "workload.cv": 0.5,
    "workload.max_tokens": 16_000,
    "workload.output_tokens": 200,
}
WORKLOADS: dict[str, tuple[Overrides, float]] = {
    "chats": ({"workload": "azure_conv"}, 8.0),
    "documents": (DOCUMENTS, 1.3),
}
"""What is asked, and the rate at which times are compared."""
TBT_SLO_S = 0.05
GOODPUTS = {"goodput_mean_rps": "joint_attainment", "goodput_p99_rps": "within_p99"}
"""What a request keeps besides its TTFT SLO: the mean, or the 99th percentile, of its own times between tokens."""


def chunks(tokens: int) -> Overrides:
    return {"policy": "vllm", "policy.batching.tokens": tokens}


def groups(tokens: int) -> Overrides:
    return {"policy": "layered_prefill", "policy.batching.group_tokens": tokens}


POLICIES = {
    "chunks of 512": chunks(512),
    "chunks of 1024": chunks(1024),
    "chunks of 2048": chunks(2048),
    "layered, groups of 512": groups(512),
    "layered, groups of 1024": groups(1024),
    "layered, groups of 2048": groups(2048),
}
SIZES = (256, 512, 1024, 2048, 4096)
KINDS: dict[str, Callable[[int], Overrides]] = {"chunks": chunks, "layered": groups}
COLOCATED = {"cluster": "colocated", "gpu": "h100"}
PAPERS = {"model": "qwen3-30b-a3b", "tp": 2, "workload.max_tokens": 16_384} | DOCUMENTS
"""Two H100s as one group; only the mean of the prompts' lengths is known."""
PUBLISHED = {
    "mean TTFT": ("ttft_s.mean", -0.30, -0.56),
    "median TTFT": ("ttft_s.p50", -0.358, math.nan),
    "p99 TTFT": ("ttft_s.p99", -0.055, -0.53),
    "mean TBT": ("tbt_mean_s", -0.241, -0.35),
    "median TBT": ("tbt_p50_s", -0.174, math.nan),
    "p99 TBT": ("tbt_p99_s", -0.242, -0.27),
}
"""Layered prefill less chunks of 512, as a share: at 1.5 req/s against vLLM 0.10.2 (README of its code), at 1.3 req/s
against the authors' own chunked engine (the paper's table 6)."""
RATES_RPS = (1.3, 1.5, 2.0)
DECODES = (1, 8, 32, 128)


def between_tokens(result: Result) -> dict[str, float]:
    """Times between the tokens of all requests together, s; and the share of requests that keep both SLOs, the second
    with 99 % of their times between tokens."""
    tables, requests = result.tables, result.tables["requests"]
    kept = (requests["ttft_s"] <= requests["ttft_slo_s"]) & ~(requests["tbt_p99_s"] > TBT_SLO_S)
    times = token_times_s(tables["steps"], tables["tokens"], tables["requests"]["first_token_s"])
    gaps_s = np.concatenate([np.diff(times_s) for times_s in times.values()])
    median_s, p99_s = np.percentile(gaps_s, [50, 99])
    return {
        "tbt_mean_s": float(gaps_s.mean()),
        "tbt_p50_s": float(median_s),
        "tbt_p99_s": float(p99_s),
        "within_p99": float(kept.mean()),
    }


# ---------------------------------------------------------------- running


def swept(cells: list[dict[str, Any]], folder: Path, requests: int = NUM_REQUESTS) -> pd.DataFrame:
    """The mean over seeds of each cell's figures; a cell's `label.NAME` are its own columns."""
    labels = [{key: cell.pop(key) for key in list(cell) if key.startswith("label.")} for cell in cells]
    found = flowsim.sweep(
        [f"workload.num_requests={requests}"],
        [COLOCATED | cell for cell in cells],
        seeds=SEEDS,
        folder=folder / "runs",
        jobs=JOBS,
        measure=between_tokens,
    )
    figures = ["ttft_s.mean", "ttft_s.p50", "ttft_s.p99", "tbt_mean_s", "tbt_p50_s", "tbt_p99_s"]
    figures += ["decode.mean_sequences", "utilisation"]
    rows = found[figures].to_numpy(dtype=float).reshape(len(cells), len(SEEDS), len(figures)).mean(axis=1)
    named = [{key.removeprefix("label."): value for key, value in one.items()} for one in labels]
    return pd.concat([pd.DataFrame(named), pd.DataFrame(rows, columns=figures)], axis=1)


def layered(folder: Path) -> pd.DataFrame:
    """Times at one rate, and goodput with two readings of an SLO on times between tokens."""
    cells, tables = [], []
    for model, key in MODELS.items():
        for workload, (asked, rate_rps) in WORKLOADS.items():
            own = asked | {"model": key}
            for policy, chosen in POLICIES.items():
                about = {"label.model": model, "label.workload": workload, "label.policy": policy}
                cells.append(own | chosen | {"workload.rate_rps": rate_rps} | about)
            for column, attained in GOODPUTS.items():
                found = flowsim.goodput(
                    [f"workload.num_requests={GOODPUT_REQUESTS}", f"workload.tbt_slo_s={TBT_SLO_S}"],
                    [COLOCATED | own | chosen for chosen in POLICIES.values()],
                    attained=attained,
                    measure=between_tokens,
                    seeds=SEEDS,
                    start_rps=rate_rps,
                    precision=0.1,
                    folder=folder / "runs",
                    jobs=JOBS,
                )
                about = {"model": model, "workload": workload, "policy": list(POLICIES), "kept": column}
                tables.append(pd.DataFrame(about | {"goodput_rps": found.table["goodput_rps"].to_numpy()}))
    keys = ["model", "workload", "policy"]
    goodput = pd.concat(tables).pivot(index=keys, columns="kept", values="goodput_rps")
    return swept(cells, folder).merge(goodput.reset_index(), on=keys)


def layered_frontier(folder: Path) -> pd.DataFrame:
    """Median TTFT against the 99th percentile of times between tokens, by the size of chunks and of groups."""
    asked, rate_rps = WORKLOADS["documents"]
    cells = [
        asked
        | {
            "model": key,
            "workload.rate_rps": rate_rps,
            "label.model": model,
            "label.kind": kind,
            "label.tokens": tokens,
        }
        | chosen(tokens)
        for model, key in MODELS.items()
        for kind, chosen in KINDS.items()
        for tokens in SIZES
    ]
    return swept(cells, folder)


def layered_published(folder: Path) -> pd.DataFrame:
    """The set-up that the authors measured, as far as it is known."""
    cells = [
        PAPERS | POLICIES[policy] | {"workload.rate_rps": rate_rps, "label.rate_rps": rate_rps, "label.policy": policy}
        for rate_rps in RATES_RPS
        for policy in ("chunks of 512", "layered, groups of 512")
    ]
    return swept(cells, folder)


def layered_experts(_folder: Path) -> pd.DataFrame:
    """What the experts take of one prompt's prefill beside decodes, in chunks and by layers, and all of its steps."""
    profile = load_profile(MODELS[MOE], COLOCATED["gpu"])
    engine = replace(profile, pass_s=0.0)  # steps are planned ahead
    whole, bare = LatencyModel(engine), LatencyModel(replace(engine, experts={}))
    prompt_tokens = 8192
    rows = []
    for number in DECODES:
        beside = Decodes(number, MEAN_TOKENS * number, MEAN_TOKENS)
        for policy, steps in {
            "chunks of 512": _in_chunks(prompt_tokens, 512),
            "chunks of 2048": _in_chunks(prompt_tokens, 2048),
            "layered, groups of 512": _in_groups(prompt_tokens, profile.layers),
        }.items():
            with_s, without_s = (sum(step(model, beside) for step in steps) for model in (whole, bare))
            longest_s = max(step(whole, beside) for step in steps)
            rows.append((number, policy, with_s - without_s, with_s, longest_s))
    return pd.DataFrame(rows, columns=["decodes", "policy", "experts_s", "all_s", "longest_s"])


Step = Callable[[LatencyModel, Decodes], float]


def _in_chunks(prompt_tokens: int, tokens: int) -> list[Step]:
    """The steps of a prompt in chunks, each as seconds of a model beside decodes."""
    return [
        lambda model, beside, done=done: model.timeline([(tokens, done)], 1.0, beside).total_s
        for done in range(0, prompt_tokens, tokens)
    ]


def _in_groups(prompt_tokens: int, layers: int) -> list[Step]:
    """The same by groups of layers."""
    count = math.ceil(prompt_tokens / 512)
    ends = [round(layers * group / count) for group in range(count + 1)]
    return [
        lambda model, beside, group=range(first, last): model.layered([(prompt_tokens, 0)], group, 1.0, beside).total_s
        for first, last in pairwise(ends)
    ]


STUDIES: dict[str, Callable[[Path], pd.DataFrame | None]] = {
    study.__name__: study for study in (layered_experts, layered_published, layered_frontier, layered)
}
