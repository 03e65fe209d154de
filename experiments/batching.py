"""SLO-aware batching and its token budget: `python -m experiments.batching`."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.paper import GOODPUT, Claim, Experiment, main, one
from flowsim.report import plots


def draw(table: pd.DataFrame) -> Figure:
    return plots.goodput(table, by="batching")


def claims(table: pd.DataFrame) -> list[Claim]:
    alone, default = (one(table, "goodput_rps", batching=name) for name in ("alone", "2048"))
    best = table[table.goodput_rps > 0.999 * table.goodput_rps.max()]
    return [
        Claim("goodput with batches of 2048 tokens over none", "-", f"{default / alone:.2f}"),
        Claim("best token budgets", "2048 is used", " = ".join(best.batching)),
    ]


def words(table: pd.DataFrame) -> str:
    rates = ", ".join(f"{row.batching} {row.goodput_rps:.2f}" for row in table.itertuples())
    alone, default = (one(table, "goodput_rps", batching=name) for name in ("alone", "2048"))
    return (
        f"Goodput in req/s: {rates}. On this workload SLO-aware batching adds {default / alone - 1:.0%}, which is "
        "about what the search can tell apart (2 %): a batch shares `pass_s` and the weights-bound floor of the GEMMs, "
        "and prompts of this mix are mostly above the floor, where a token costs what it costs. A larger budget makes "
        "the head wait for more of them, and loses."
    )


EXPERIMENT = Experiment(
    name="batching",
    title="Goodput without batching and by token budget (Llama3-8B, one A800, workload mixed)",
    columns=("batching", *GOODPUT),
    draw=draw,
    claims=claims,
    words=words,
)

if __name__ == "__main__":
    main(EXPERIMENT)
