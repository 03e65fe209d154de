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
    request, operator = (one(table, "goodput_rps", stops=stops, check_s=DEFAULT_S) for stops in ("request", "operator"))
    over_layer = {
        check_s: one(table, "goodput_rps", stops="operator", check_s=check_s)
        / one(table, "goodput_rps", stops="layer", check_s=check_s)
        for check_s in (FREE_S, DEFAULT_S, DEAR_S)
    }
    return (
        f"Preemption is worth {operator / request:.1f} times the goodput of the same order without it. How fine it is "
        f"matters much less: operator stops reach {over_layer[FREE_S]:.1%} of the goodput of layer stops with free "
        f"checks, {over_layer[DEFAULT_S]:.1%} with checks of 20 us and {over_layer[DEAR_S]:.1%} with checks of 100 us "
        "(the search ends at 1 %). They pay for five checks a layer in every prefill, layer stops for one, and the few "
        "milliseconds of blocking that they save are small beside SLOs of 250 ms and more. The paper reports blocking "
        "times, and no goodput by granularity."
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
