"""Goodput by the granularity of stops and the cost of a check: `python -m experiments.granularity`."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.paper import GOODPUT, Claim, Experiment, main, one
from flowsim.report import plots

FREE_S, DEFAULT_S, DEAR_S = 0.0, 20e-6, 100e-6


def shaped(table: pd.DataFrame) -> pd.DataFrame:
    table = table.rename(
        columns={
            "policy.stops": "stops",
            "overheads.check_s": "check_s",
        }
    )
    table["check"] = [f"check {1e6 * check_s:g} us" for check_s in table.check_s]
    return table


def draw(table: pd.DataFrame) -> Figure:
    return plots.parameter(table, "stops", "goodput_rps", by="check")


def claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for check_s in (FREE_S, DEFAULT_S, DEAR_S):
        operator, layer = (one(table, "goodput_rps", stops=stops, check_s=check_s) for stops in ("operator", "layer"))
        what = f"goodput with operator stops over layer stops, checks of {1e6 * check_s:g} us"
        found.append(Claim(what, "-", f"{operator / layer:.3f}"))
    return found


def words(table: pd.DataFrame) -> str:
    best = {check_s: rows.loc[rows.goodput_rps.idxmax(), "stops"] for check_s, rows in table.groupby("check_s")}
    request = one(table, "goodput_rps", stops="request", check_s=DEFAULT_S)
    operator = one(table, "goodput_rps", stops="operator", check_s=DEFAULT_S)
    return (
        f"Preemption is worth {operator / request:.1f} times the goodput of the same order without it. How fine it is "
        f"matters much less: the best granularity is {best[FREE_S]} with free checks, {best[DEFAULT_S]} with checks of "
        f"20 us and {best[DEAR_S]} with checks of 100 us, since operator stops pay for five checks a layer in every "
        "prefill, and layer stops for one. The paper reports blocking times and does not state goodput by granularity."
    )


EXPERIMENT = Experiment(
    name="granularity",
    title="Goodput by granularity and cost of a check (Llama3-8B, one A800, workload mixed)",
    columns=(
        "policy.stops", "overheads.check_s", *GOODPUT,
    ),
    draw=draw,
    claims=claims,
    words=words,
    shaped=shaped,
)  # fmt: skip

if __name__ == "__main__":
    main(EXPERIMENT)
