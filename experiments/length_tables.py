"""Compute the quantile tables of public traces: `python -m experiments.length_tables`.

Writes `azure_code`, `azure_conv`, `mooncake` and `long_docs` under `flowsim/workload/tables/` from the measured data
that `FLOWSIM_DATA` names (default `../shared/data` beside the checkout), so that workloads of their lengths run
without the files. Prompt and output lengths are drawn independently of each other.
"""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np

from experiments.mixed_quantiles import LEVELS, ROOT, data_folder

SOURCES = {
    "azure_code": (
        "code",
        "trace_azure2023_code.csv.gz",
        "Azure LLM inference trace 2023, code completion (Patel et al., ISCA 2024), Azure/AzurePublicDataset",
        "b469a113cedc",
        "CC-BY-4.0",
    ),
    "azure_conv": (
        "conversation",
        "trace_azure2023_conv.csv.gz",
        "Azure LLM inference trace 2023, conversation (Patel et al., ISCA 2024), Azure/AzurePublicDataset",
        "b469a113cedc",
        "CC-BY-4.0",
    ),
    "mooncake": (
        "conversation",
        "trace_mooncake_conversation.csv.gz",
        "Mooncake FAST 2025 conversation trace, kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl",
        "3b5a59413395",
        "Apache-2.0",
    ),
    "long_docs": (
        "document",
        "lengths_vidur_arxiv_summarization.csv.gz",
        "arXiv summarisation in Llama-2 tokens, microsoft/vidur, data/processed_traces/arxiv_summarization_stats",
        "7d47513363ec",
        "MIT",
    ),
}

HEADER = """\
# python -m experiments.length_tables
# writes this file from {file}; edit the script, not the file.
source: {source}
commit: {commit}
licence: {licence}
command: python -m experiments.length_tables
# `quantiles` are [level, prompt tokens], `output_quantiles` [level, output tokens]: the i-th of n sorted values,
# i = 0 .. n - 1, is at level i / (n - 1), straight lines between the levels kept.
classes:
  {name}:
    share: 1.0
    points: {points}
"""


def lengths(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and output tokens of every row of a data file."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    prompts, outputs = np.array(rows, dtype=np.float64).T
    return prompts, outputs


def render(table: str, prompts: np.ndarray, outputs: np.ndarray) -> str:
    """The text of one table file."""
    name, file, source, commit, licence = SOURCES[table]
    text = HEADER.format(name=name, file=file, source=source, commit=commit, licence=licence, points=len(prompts))
    for key, values in (("quantiles", prompts), ("output_quantiles", outputs)):
        quantiles = np.maximum(1.0, np.quantile(values, LEVELS)).round(2)
        lines = [f"      - [{q}, {v:.10g}]" for q, v in zip(LEVELS, quantiles.tolist(), strict=True)]
        text += f"    {key}:\n" + "\n".join(lines) + "\n"
    return text


def main() -> None:
    folder = data_folder()
    print(f"{'table':12}{'rows':>8}{'prompt mean':>13}{'p50':>8}{'p99':>9}{'output mean':>13}")
    for table, (_, file, *_) in SOURCES.items():
        prompts, outputs = lengths(folder / file)
        path = ROOT / "flowsim" / "workload" / "tables" / f"{table}.yaml"
        path.write_text(render(table, prompts, outputs), encoding="utf-8")
        p50, p99 = np.percentile(prompts, [50, 99])
        print(f"{table:12}{len(prompts):8}{prompts.mean():13.1f}{p50:8.0f}{p99:9.0f}{outputs.mean():13.1f}")


if __name__ == "__main__":
    main()
