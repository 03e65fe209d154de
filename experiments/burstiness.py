"""Goodput against the burstiness of arrivals: `python -m experiments.burstiness`."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.paper import GOODPUT, Claim, Experiment, main, one
from flowsim.report import plots


def draw(table: pd.DataFrame) -> Figure:
    return plots.parameter(table, "cv", "goodput_rps", by="policy")


def claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for cv in sorted(table.cv.unique()):
        own, theirs = (one(table, "goodput_rps", policy=policy, cv=cv) for policy in ("flowprefill", "chunked_2k"))
        what = f"goodput, flowprefill over chunked_2k, CV {cv:g}"
        ours = f"{own / theirs:.1f}" if theirs == theirs else f"{own:.2f} req/s over none"
        found.append(Claim(what, "4.7 to 5.6 on a trace" if cv == 1 else "-", ours))
    return found


def words(table: pd.DataFrame) -> str:
    rows = "; ".join(
        f"CV {cv:g}: " + ", ".join(f"{row.policy} {_rate(row.goodput_rps)}" for row in at.itertuples())
        for cv, at in table.groupby("cv")
    )
    return (
        f"Goodput in req/s. {rows}. The ratio grows because the baselines collapse: in a burst first-come first-served "
        "makes everybody late, while S-EDF with preemption still serves the short ones. Ratios to a baseline that "
        "serves next to nothing say little; read the rates."
    )


def _rate(goodput_rps: float) -> str:
    return f"{goodput_rps:.2f}" if goodput_rps == goodput_rps else "none, not even at 0.05"


EXPERIMENT = Experiment(
    name="burstiness",
    title="Goodput against the CV of the gaps between arrivals (Llama3-8B, one A800, workload mixed)",
    columns=("policy", "cv", *GOODPUT),
    draw=draw,
    claims=claims,
    words=words,
)

if __name__ == "__main__":
    main(EXPERIMENT)
