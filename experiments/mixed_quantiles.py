"""Compute `flowsim/workload/tables/qwentrace.yaml` from the measured FlowPrefill run and compare moments.

Run from the checkout: `python -m experiments.mixed_quantiles`. `FLOWSIM_DATA` names the folder of measured
data (default `../shared/data` beside the checkout). The run's 323 printed requests and the four inferred
ones give, per class, every order statistic, or for text 33 quantiles that are dense in the tail.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flowsim.workload.lengths import load_quantiles

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "flowsim" / "workload" / "tables" / "qwentrace.yaml"
SHARES = {"text": 0.691, "image": 0.073, "search": 0.202, "file": 0.034}

# Mean, P99 and standard deviation that the paper gives, in trace tokens; prompts have TEMPLATE_TOKENS more.
PAPER_TOKENS = {
    "text": (646, 3256, 630),
    "image": (393, 808, 113),
    "search": (5055, 15127, 3070),
    "file": (4132, 10560, 3519),
}
TEMPLATE_TOKENS = 2
ALLOWED = {"mean": 0.04, "P99": 0.03, "std": 0.10}
REPORTED_ONLY = {("image", "std")}  # it hangs on one request of 24, the longest

EVERY_ORDER_STATISTIC = 66  # classes of at most this many requests keep every one of them
TAIL_LEVELS = [0.925, 0.95, 0.96, 0.97, 0.975, 0.98, 0.985, 0.9875, 0.99, 0.9925, 0.995, 0.9975, 0.999, 1.0]
LEVELS = [*np.linspace(0.0, 0.9, 19).round(6).tolist(), *TAIL_LEVELS]
KNOT = 0.99  # a level of every class, so that P99 is the measured one

HEADER = """\
# python -m experiments.mixed_quantiles
# writes this file from measured data; edit the script, not the file.
source: HSIEHCHIACHI/FlowPrefill, benchmarks/benchmark_offline.ipynb, cell outputs (arXiv 2602.16603)
commit: 1ca0fec2b9ca
licence: Apache-2.0
command: python -m experiments.mixed_quantiles
data:
  - flowprefill_a800_llama31_8b_requests.csv
  - flowprefill_a800_llama31_8b_unprinted.csv
# `points` are the requests behind a class (323 printed, 4 inferred: the first of "927 or 928"; trace tokens
# + 2). `quantiles` are [level, prompt tokens]. The i-th of n sorted values, i = 0 .. n - 1, is at level
# i / (n - 1): the minimum at 0, the maximum at 1, straight lines between, and a knot at 0.99.
classes:
"""


def main() -> None:
    """Write the table, then print how its moments compare with the paper's."""
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_bytes(render(prompt_tokens(data_folder())).encode("utf-8"))
    print(f"wrote {TABLE.relative_to(ROOT)}\n")
    print(f"{'class':8}{'moment':8}{'paper + 2':>10}{'table':>10}{'off by':>9}  allowed")
    for name, moment, paper, found in compare():
        allowed = "reported" if (name, moment) in REPORTED_ONLY else f"{ALLOWED[moment]:.0%}"
        print(f"{name:8}{moment:8}{paper:10.0f}{found:10.1f}{found / paper - 1:+9.1%}  {allowed}")


def data_folder() -> Path:
    """The folder of measured data.

    Raises:
        SystemExit: it is not there.
    """
    folder = Path(os.environ.get("FLOWSIM_DATA", ROOT / ".." / "shared" / "data"))
    if not (folder / "flowprefill_a800_llama31_8b_requests.csv").is_file():
        raise SystemExit(
            f"{folder}: no flowprefill_a800_llama31_8b_requests.csv there; "
            "set FLOWSIM_DATA to the folder of measured data"
        )
    return folder


def prompt_tokens(folder: Path) -> dict[str, list[int]]:
    """The sorted prompt lengths of each class in tokens, printed and inferred requests together."""
    tokens: dict[str, list[int]] = {name: [] for name in SHARES}
    with open(folder / "flowprefill_a800_llama31_8b_requests.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            tokens[row["request_class"]].append(int(row["prompt_tokens"]))
    with open(folder / "flowprefill_a800_llama31_8b_unprinted.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            first = int(row["inferred_trace_input_tokens"].split()[0])
            tokens[row["request_class"]].append(first + TEMPLATE_TOKENS)
    return {name: sorted(values) for name, values in tokens.items()}


def render(tokens: dict[str, list[int]]) -> str:
    """The text of the table file."""
    lines = []
    for name, share in SHARES.items():
        values = np.array(tokens[name], dtype=np.float64)
        lines += [f"  {name}:", f"    share: {share}", f"    points: {len(values)}", "    quantiles:"]
        levels = _levels(len(values))
        quantiles = np.quantile(values, levels).round(2)
        lines += [f"      - [{q}, {v:.10g}]" for q, v in zip(levels.tolist(), quantiles.tolist(), strict=True)]
    return HEADER + "\n".join(lines) + "\n"


def compare() -> list[tuple[str, str, float, float]]:
    """Class, moment, the paper's value in prompt tokens, and the committed table's."""
    rows: list[tuple[str, str, float, float]] = []
    for name, entry in load_quantiles(TABLE).items():
        mean, p99, std = PAPER_TOKENS[name]
        table = entry.prompt_tokens
        rows.append((name, "mean", mean + TEMPLATE_TOKENS, table.mean()))
        rows.append((name, "P99", p99 + TEMPLATE_TOKENS, float(table.quantile(0.99))))
        rows.append((name, "std", std, table.std()))
    return rows


def _levels(points: int) -> NDArray[np.float64]:
    if points > EVERY_ORDER_STATISTIC:
        return np.array(LEVELS)
    return np.union1d((np.arange(points) / (points - 1)).round(6), [KNOT])


if __name__ == "__main__":
    main()
