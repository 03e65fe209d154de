"""TTFT attainment against the request rate, by policy: `python -m experiments.attainment_by_rate`."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.paper import Claim, Experiment, crossing, main, one
from flowsim.report import plots

BASELINES = ("chunked_2k", "chunked_8k", "fcfs")


def draw(table: pd.DataFrame) -> Figure:
    return plots.attainment(table, width_in=plots.COLUMN_IN)


def claims(table: pd.DataFrame) -> list[Claim]:
    low, high = (one(table, "attainment", policy="flowprefill", rate_rps=rate_rps) for rate_rps in (10, 14))
    best = max(one(table, "attainment", policy=policy, rate_rps=4) for policy in BASELINES)
    own = one(table, "attainment", policy="flowprefill", rate_rps=4)
    return [
        Claim("attainment at 4 req/s, flowprefill and the best baseline", "-", f"{own:.1%} and {best:.1%}"),
        Claim("attainment of flowprefill at 10 and 14 req/s", "-", f"{low:.1%} and {high:.1%}"),
    ]


def words(table: pd.DataFrame) -> str:
    found = {name: crossing(rows, "rate_rps") for name, rows in table.groupby("policy")}
    ratio = {name: found[name] / found["fcfs"] for name in ("request_sedf", "layer_sedf", "flowprefill")}
    listed = ", ".join(f"{name} {rate_rps:.1f}" for name, rate_rps in found.items())
    return (
        f"Where the curves cross 90 %, in req/s: {listed}. The order alone, without preemption (request_sedf), gives "
        f"{ratio['request_sedf']:.1f} times fcfs, with preemption at layers {ratio['layer_sedf']:.1f} times and at "
        f"operators {ratio['flowprefill']:.1f} times. The baselines lose everybody at once when they overload; with "
        "S-EDF the late ones wait and the others are still served."
    )


EXPERIMENT = Experiment(
    name="attainment_by_rate",
    title="TTFT attainment against the request rate, by policy (Llama3-8B, one A800, workload mixed)",
    columns=("policy", "rate_rps", "seed", "requests", "attainment"),
    draw=draw,
    claims=claims,
    words=words,
)

if __name__ == "__main__":
    main(EXPERIMENT)
