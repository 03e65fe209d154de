"""S-EDF against EDF, FCFS and shortest first: `python -m experiments.ordering`."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.paper import Claim, Experiment, crossing, main, one
from flowsim.report import plots


def draw(table: pd.DataFrame) -> Figure:
    return plots.attainment(table, by="order")


def claims(table: pd.DataFrame) -> list[Claim]:
    found = {name: crossing(rows, "rate_rps") for name, rows in table.groupby("order")}
    under, over = (
        {name: one(table, "attainment", order=name, rate_rps=rate_rps) for name in ("S-EDF", "EDF")}
        for rate_rps in (10, 16)
    )
    return [
        Claim("rate at which 90 % is left, S-EDF over FCFS", "-", f"{found['S-EDF'] / found['FCFS']:.2f}"),
        Claim("rate at which 90 % is left, S-EDF over EDF", "-", f"{found['S-EDF'] / found['EDF']:.2f}"),
        Claim("attainment at 16 req/s, S-EDF and EDF", "-", f"{over['S-EDF']:.1%} and {over['EDF']:.1%}"),
        Claim("attainment at 10 req/s, S-EDF and EDF", "-", f"{under['S-EDF']:.1%} and {under['EDF']:.1%}"),
    ]


def words(table: pd.DataFrame) -> str:
    found = ", ".join(f"{name} {crossing(rows, 'rate_rps'):.1f}" for name, rows in table.groupby("order", sort=False))
    return (
        f"Rate in req/s at which attainment crosses 90 %: {found}. All have the same SLO-aware batches and stop at "
        "operators. EDF spends its GPU on requests that are already late once there are any, and then falls off a "
        "cliff; S-EDF puts these last and keeps those that can still be met."
    )


EXPERIMENT = Experiment(
    name="ordering",
    title="TTFT attainment by order, batches and stops alike (Llama3-8B, one A800, workload mixed)",
    columns=("order", "rate_rps", "seed", "requests", "attainment"),
    draw=draw,
    claims=claims,
    words=words,
)

if __name__ == "__main__":
    main(EXPERIMENT)
