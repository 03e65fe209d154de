"""Goodput against the degree of tensor parallelism: `python -m experiments.tensor_parallel`."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.paper import GOODPUT, Claim, Experiment, main, one
from flowsim.report import plots


def shaped(table: pd.DataFrame) -> pd.DataFrame:
    table = table.copy()
    table["goodput_per_GPU_rps"] = table.goodput_rps / table.tp
    return table


def draw(table: pd.DataFrame) -> Figure:
    return plots.parameter(table, "tp", ["goodput_rps", "goodput_per_GPU_rps"], by="policy")


def claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for tp in (1, 2, 4):
        own, theirs = (one(table, "goodput_rps", policy=policy, tp=tp) for policy in ("flowprefill", "chunked_2k"))
        found.append(Claim(f"goodput, flowprefill over chunked_2k, TP {tp}", "-", f"{own / theirs:.2f}"))
    return found


def words(table: pd.DataFrame) -> str:
    per_gpu = ", ".join(
        f"TP {tp} {one(table, 'goodput_per_GPU_rps', policy='flowprefill', tp=tp):.2f}" for tp in (1, 2, 4)
    )
    gain = one(table, "goodput_rps", policy="chunked_2k", tp=4) / one(table, "goodput_rps", policy="chunked_2k", tp=1)
    goodput = table.pivot(index="tp", columns="policy", values="goodput_rps")
    coarse = ", ".join(f"{ratio:.2f}" for ratio in goodput.layer_sedf / goodput.flowprefill)
    return (
        f"Goodput of flowprefill per GPU in req/s: {per_gpu}. First-come first-served reaches {gain:.1f} times its "
        "goodput with 4 times the GPUs, although these are less efficient together: each prefill that others "
        "wait for is shorter, and SLOs stay. What preemption adds shrinks accordingly (experiment relative_slos). "
        f"Layer stops reach {coarse} times the goodput of operator stops at TP 1, 2 and 4: that a group stops one "
        "operator later costs it nothing that is seen here. The search ends at 5 %. "
        "The paper runs each model at one degree."
    )


EXPERIMENT = Experiment(
    name="tensor_parallel",
    title="Goodput against the degree of tensor parallelism (Llama3-8B, A800, workload mixed)",
    columns=("policy", "tp", *GOODPUT),
    draw=draw,
    claims=claims,
    words=words,
    shaped=shaped,
)

if __name__ == "__main__":
    main(EXPERIMENT)
