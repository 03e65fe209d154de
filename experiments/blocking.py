"""How long a flag waits, by the granularity of stops and the cost of a check: `python -m experiments.blocking`."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.paper import Claim, Experiment, between, main, one
from flowsim.report import plots

STOPS = ("request", "pass", "layer", "block", "operator")
PUBLISHED_MS, PUBLISHED_RATIO = 4.5, (3.5, 4.2)
CHECK_S = 20e-6  # of the profile


def shaped(table: pd.DataFrame) -> pd.DataFrame:
    table = table.rename(columns={"policy.stops": "stops", "overheads.check_s": "check_s"})
    table["mean_blocking_ms"] = 1e3 * table["preemptions.blocking_s.mean"]
    table["p90_blocking_ms"] = 1e3 * table["preemptions.blocking_s.p90"]
    return table


def draw(table: pd.DataFrame) -> Figure:
    figure = plots.parameter(table[table.check_s == CHECK_S], "stops", ["mean_blocking_ms", "attainment"])
    figure.axes[0].set_yscale("log")
    return figure


def claims(table: pd.DataFrame) -> list[Claim]:
    layer, operator = (one(table, "mean_blocking_ms", stops=stops, check_s=CHECK_S) for stops in ("layer", "operator"))
    low, high = PUBLISHED_RATIO
    ratio = layer / operator
    return [
        Claim(
            "mean blocking with operator stops", f"< {PUBLISHED_MS} ms", f"{operator:.2f} ms", operator < PUBLISHED_MS
        ),
        Claim(
            "mean blocking, layer over operator stops", f"{low} to {high}", f"{ratio:.2f}", between(ratio, low, high)
        ),
    ]


def words(table: pd.DataFrame) -> str:
    by_stops = {stops: one(table, "mean_blocking_ms", stops=stops, check_s=CHECK_S) for stops in STOPS}
    free = one(table, "mean_blocking_ms", stops="operator", check_s=0.0)
    dear = one(table, "mean_blocking_ms", stops="operator", check_s=1e-4)
    listed = ", ".join(f"{stops} {value:.3g}" for stops, value in by_stops.items())
    return (
        f"Mean milliseconds from flag to acknowledgement, checks of 20 us: {listed}. With free checks operator stops "
        f"block for {free:.2f} ms, with checks of 100 us for {dear:.2f} ms. What a check costs hardly shows in "
        "blocking: it lengthens every prefill instead (experiment granularity). A layer has five operators of unequal "
        "length and a flag is likelier to fall into a long one, so the ratio stays below five."
    )


EXPERIMENT = Experiment(
    name="blocking",
    title="Blocking time by granularity and cost of a check, at 6 req/s (Llama3-8B, one A800, workload mixed)",
    columns=(
        "policy.stops", "overheads.check_s", "seed", "requests", "attainment",
        "preemptions.count", "preemptions.blocking_s.mean", "preemptions.blocking_s.p90",
    ),
    draw=draw,
    claims=claims,
    words=words,
    shaped=shaped,
)  # fmt: skip

if __name__ == "__main__":
    main(EXPERIMENT)
