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
    best = table.loc[table.goodput_rps.idxmax()]
    return [
        Claim("goodput with batches of 2048 tokens over none", "-", f"{default / alone:.2f}"),
        Claim(
            "best token budget", "2048 is used", f"{best.batching} ({best.goodput_rps / default:.3f} of that of 2048)"
        ),
    ]


def words(table: pd.DataFrame) -> str:
    rates = ", ".join(f"{row.batching} {row.goodput_rps:.2f}" for row in table.itertuples())
    return (
        f"Goodput in req/s: {rates}. Batches share the weights-bound floor of the GEMMs and `pass_s` among short "
        "prompts; above the floor tokens cost what they cost, and a larger budget only makes the head wait for more "
        "of them."
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
