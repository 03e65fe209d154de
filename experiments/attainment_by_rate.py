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
    layer, request = found["layer_sedf"] / found["flowprefill"], found["request_sedf"]
    return (
        f"Where the curves cross 90 %: flowprefill {found['flowprefill']:.1f}, layer_sedf {found['layer_sedf']:.1f}, "
        f"request_sedf {request:.1f}, chunked_8k {found['chunked_8k']:.1f}, chunked_2k {found['chunked_2k']:.1f}, fcfs "
        f"{found['fcfs']:.1f} req/s. The order alone, without preemption (request_sedf), gives "
        f"{request / found['fcfs']:.1f} times fcfs; stopping at operators gives the rest, and stopping at layers "
        f"{layer:.0%} of that."
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
