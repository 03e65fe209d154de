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
    full = table[table.rate_rps == SATURATED_RPS][["order", "chunk_tokens", "seed", "tokens_per_busy_s"]]
    full = full.rename(columns={"tokens_per_busy_s": "throughput_tokens_per_s"})
    return light.merge(full, on=["order", "chunk_tokens", "seed"])


def draw(table: pd.DataFrame) -> Figure:
    columns = ["throughput_tokens_per_s", "p90_TTFT_of_text_s", "attainment"]
    return plots.parameter(table, "chunk_tokens", columns, by="order", width_in=plots.COLUMN_IN)


def means(table: pd.DataFrame, order: str) -> pd.DataFrame:
    """By chunk, over the seeds."""
    return table[table.order == order].groupby("chunk_tokens").mean(numeric_only=True)


def claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for order in table.order.unique():
        mean = means(table, order)
        throughput, wait_s = mean.throughput_tokens_per_s, mean.p90_TTFT_of_text_s
        ends = f"with chunks of {mean.index.min()} tokens relative to {mean.index.max()}, {order}"
        lost = throughput.iloc[0] / throughput.iloc[-1]
        found.append(Claim(f"throughput {ends}", "below 100 %", f"{lost:.0%}", bool(lost < 1.0)))
        found.append(
            Claim(
                f"p90 TTFT of text {ends}",
                "below 100 %",
                f"{wait_s.iloc[0] / wait_s.iloc[-1]:.0%}",
                bool(wait_s.iloc[0] < wait_s.iloc[-1]),
            )
        )
        found.append(Claim(f"chunk with the lowest p90 TTFT of text, {order}", "-", f"{wait_s.idxmin()} tokens"))
    return found


def words(table: pd.DataFrame) -> str:
    listed = []
    for order in table.order.unique():
        rows = ", ".join(
            f"{chunk}: {row.throughput_tokens_per_s:,.0f} tokens/s, {row.p90_TTFT_of_text_s:.2f} s, "
            f"{row.attainment:.0%}"
            for chunk, row in means(table, order).iterrows()
        )
        listed.append(f"{order}: {rows}")
    return (
        f"Chunk, throughput when saturated ({SATURATED_RPS:g} req/s), p90 TTFT of class text and attainment at "
        f"{LIGHT_RPS:g} req/s. {'; '.join(listed)}. The paper's abstract states both sides of the trade: smaller "
        "chunks respond sooner and compute less efficiently. The second shows at once, the first only where a pass's "
        "end is used to let somebody else go first: under first come first served a short prompt waits for every older "
        "one whatever the chunk, and small chunks only make these slower."
    )


EXPERIMENT = Experiment(
    name="chunk_size",
    title="Throughput and latency against the chunk size of chunked prefill (Llama3-8B, one A800, workload mixed)",
    columns=(
        "order", CHUNK, "rate_rps", "seed", "requests", "attainment",
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
