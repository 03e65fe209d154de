"""Goodput against the share of long prompts: `python -m experiments.long_prompts`."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.paper import GOODPUT, Claim, Experiment, main, one
from flowsim.report import plots


def draw(table: pd.DataFrame) -> Figure:
    return plots.parameter(table, "long_share", "goodput_rps", by="policy")


def ratios(table: pd.DataFrame) -> dict[float, float]:
    """Goodput of flowprefill over chunked_2k by share."""
    shares = sorted(table.long_share.unique())
    return {
        share: one(table, "goodput_rps", policy="flowprefill", long_share=share)
        / one(table, "goodput_rps", policy="chunked_2k", long_share=share)
        for share in shares
    }


def claims(table: pd.DataFrame) -> list[Claim]:
    return [
        Claim(f"goodput, flowprefill over chunked_2k, {share:.0%} long", "-", f"{ratio:.2f}")
        for share, ratio in ratios(table).items()
    ]


def words(table: pd.DataFrame) -> str:
    found = ratios(table)
    widest = max(found, key=lambda share: found[share])
    rates = "; ".join(
        f"{share:.0%}: " + ", ".join(f"{row.policy} {row.goodput_rps:.2f}" for row in at.itertuples())
        for share, at in table.groupby("long_share")
    )
    return (
        f"Goodput in req/s by the share of class search among class text. {rates}. Preemption is worth most at "
        f"{widest:.0%} long prompts: with fewer there is little to wait behind, with more the GPU is busy with "
        "the long ones themselves."
    )


EXPERIMENT = Experiment(
    name="long_prompts",
    title="Goodput against the share of long prompts (Llama3-8B, one A800, classes text and search)",
    columns=("policy", "long_share", *GOODPUT),
    draw=draw,
    claims=claims,
    words=words,
)

if __name__ == "__main__":
    main(EXPERIMENT)
