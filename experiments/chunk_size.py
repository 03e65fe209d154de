"""What the chunk size of chunked prefill trades: `python -m experiments.chunk_size`."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from experiments.paper import Claim, Experiment, main
from flowsim.metrics import Result
from flowsim.report import plots

CHUNK = "policy.batching.tokens"
LIGHT_RPS, SATURATED_RPS = 2.0, 30.0


def measure(result: Result) -> Mapping[str, float]:
    """Prompt tokens per second for which the GPU was busy."""
    segments = result.tables["segments"]
    busy_s = float((segments["end_s"] - segments["start_s"]).sum())
    return {"tokens_per_busy_s": float(result.tables["requests"]["prompt_tokens"].sum()) / busy_s}


def shaped(table: pd.DataFrame) -> pd.DataFrame:
    """Throughput of the saturated runs beside the latencies of the lightly loaded ones."""
    table = table.rename(columns={CHUNK: "chunk_tokens"})
    light = table[table.rate_rps == LIGHT_RPS].drop(columns=["tokens_per_busy_s", "rate_rps"])
    light = light.rename(
        columns={"ttft_s_by_class.text.p90": "p90_TTFT_of_text_s", "ttft_s_by_class.file.p50": "file_s"}
    )
    full = table[table.rate_rps == SATURATED_RPS][["chunk_tokens", "seed", "tokens_per_busy_s"]]
    full = full.rename(columns={"tokens_per_busy_s": "throughput_tokens_per_s"})
    return light.merge(full, on=["chunk_tokens", "seed"])


def draw(table: pd.DataFrame) -> Figure:
    return plots.parameter(table, "chunk_tokens", ["throughput_tokens_per_s", "p90_TTFT_of_text_s", "attainment"])


def means(table: pd.DataFrame) -> pd.DataFrame:
    return table.groupby("chunk_tokens").mean(numeric_only=True)


def claims(table: pd.DataFrame) -> list[Claim]:
    mean = means(table)
    throughput = mean.throughput_tokens_per_s
    small, best = int(mean.index.min()), int(mean.p90_TTFT_of_text_s.idxmin())
    return [
        Claim(
            f"throughput with chunks of {small} tokens, relative to {int(mean.index.max())}",
            "below 100 %",
            f"{throughput.iloc[0] / throughput.iloc[-1]:.0%}",
            bool(throughput.iloc[0] < throughput.iloc[-1]),
        ),
        Claim("chunk with the lowest p90 TTFT of text at 2 req/s", "-", f"{best} tokens"),
    ]


def words(table: pd.DataFrame) -> str:
    mean = means(table)
    rows = "; ".join(
        f"{chunk}: {row.throughput_tokens_per_s:,.0f} tokens/s, {row.p90_TTFT_of_text_s:.2f} s, {row.attainment:.0%}"
        for chunk, row in mean.iterrows()
    )
    return (
        f"Chunk, throughput when saturated ({SATURATED_RPS:g} req/s), p90 TTFT of class text and attainment at "
        f"{LIGHT_RPS:g} req/s: {rows}. Chunks of first-come first-served prefill only cut the wait for the pass that "
        "runs; a short prompt still waits for every older one, and small chunks make each of these slower. The paper "
        "shows this trade-off without figures that could be compared."
    )


EXPERIMENT = Experiment(
    name="chunk_size",
    title="Throughput and latency against the chunk size of chunked prefill (Llama3-8B, one A800, workload mixed)",
    columns=(
        CHUNK, "rate_rps", "seed", "requests", "attainment",
        "ttft_s_by_class.text.p90", "ttft_s_by_class.file.p50", "tokens_per_busy_s",
    ),
    draw=draw,
    claims=claims,
    words=words,
    shaped=shaped,
    measure=measure,
)  # fmt: skip

if __name__ == "__main__":
    main(EXPERIMENT)
