"""The error of FlowPrefill's predictor, and what errors cost: `python -m experiments.prediction`."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.paper import GOODPUT, Claim, Experiment, main, one
from flowsim import LatencyModel, load_profile
from flowsim.predictor import GRID_TOKENS, Poly3
from flowsim.report import plots

FROM_TOKENS = 64
MODELS = (("llama3-8b", 1), ("qwen2.5-14b", 2), ("llama3-70b", 4), ("qwen3-30b-a3b", 2))


def errors(model: str, tp: int) -> list[float]:
    """Relative errors of poly3 at the reference's grid of prompt lengths, from 64 tokens on."""
    latency = LatencyModel(load_profile(model, "a800"), tp)
    predictor = Poly3(latency)
    return [abs(predictor.alone_s(n) / latency.isolated_s(n) - 1.0) for n in GRID_TOKENS if n >= FROM_TOKENS]


def draw(table: pd.DataFrame) -> Figure:
    return plots.goodput(table, by="prediction")


def claims(table: pd.DataFrame) -> list[Claim]:
    found = []
    for model, tp in MODELS:
        off = errors(model, tp)
        mean, worst = sum(off) / len(off), max(off)
        ours = f"mean {mean:.1%}, at most {worst:.1%}"
        found.append(Claim(f"error of poly3, {model} at TP {tp}", "< 10 %", ours, mean < 0.1))
    exact, cubic = (one(table, "goodput_rps", prediction=name) for name in ("exact", "poly3"))
    return [*found, Claim("goodput with poly3 over exact prediction", "-", f"{cubic / exact:.3f}")]


def words(table: pd.DataFrame) -> str:
    exact = one(table, "goodput_rps", prediction="exact")
    rates = ", ".join(f"{row.prediction} {row.goodput_rps / exact:.3f}" for row in table.itertuples())
    return (
        f"Goodput relative to exact prediction ({exact:.2f} req/s): {rates}. `spread` is the standard deviation of the "
        "logarithm of predicted over true time, drawn once for each prompt length. Errors of poly3 are those of a "
        f"cubic fitted to our own operator model, from {FROM_TOKENS} tokens on: the paper's, fitted to measured times, "
        "has noise to fit as well."
    )


EXPERIMENT = Experiment(
    name="prediction",
    title="Goodput against prediction error (Llama3-8B, one A800, workload mixed)",
    columns=("prediction", *GOODPUT),
    draw=draw,
    claims=claims,
    words=words,
)

if __name__ == "__main__":
    main(EXPERIMENT)
