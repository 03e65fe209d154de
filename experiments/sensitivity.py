"""How much the answers hang on each input: a tornado plot of goodput and attainment.

    python -m experiments.sensitivity [--num-requests N]

Workload `mixed`, Llama-3-8B on one A100, policy `flowprefill`, requests run to drain, the same random numbers on both
sides of every comparison. One input at a time is set low and high; goodput is the highest rate at which at least 90 %
of the requests of all seeds meet their TTFT SLO, attainment is at 10 req/s. Draws docs/img/sensitivity_goodput.png
and docs/img/sensitivity_attainment.png. About a minute on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import flowsim
from experiments.validate_flowprefill import show
from flowsim import LatencyModel, PrefillOnly, Request, Result, load_profile
from flowsim.check import check_result
from flowsim.latency import Exact
from flowsim.predictor import Noisy
from flowsim.report.plots import style
from flowsim.workload import mixed

SEEDS = (0, 1)
NUM_REQUESTS = 2000
TARGET = 0.9
RATE_RPS = 10.0
PRECISION = 0.01
IMAGES = Path(__file__).resolve().parents[1] / "docs" / "img"
TAIL_LEVEL = 0.9  # of a class's prompts: those above its quantile here are its tail


@dataclass(frozen=True)
class Case:
    """One set-up: what is changed of the documented run. `tail` multiplies what a prompt has beyond its class's
    quantile at `TAIL_LEVEL`."""

    costs: tuple[tuple[str, float], ...] = ()
    bias: float = 0.0
    sigma: float = 0.0
    cv: float = 1.0
    tail: float = 1.0
    kv_blocks: int | None = None


@dataclass(frozen=True)
class Input:
    """One input with its low and its high setting, each a value in words and a case."""

    name: str
    base: str
    low: tuple[str, Case]
    high: tuple[str, Case]


def _cost(**changed: float) -> Case:
    return Case(costs=tuple(changed.items()))


INPUTS = (
    Input("pass overhead", "7 ms", ("0 ms", _cost(pass_s=0.0)), ("14 ms", _cost(pass_s=0.014))),
    Input("check cost", "20 us", ("0 us", _cost(check_s=0.0)), ("100 us", _cost(check_s=1e-4))),
    Input("predictor bias", "0 %", ("-20 %", Case(bias=-0.2)), ("+20 %", Case(bias=0.2))),
    Input("predictor spread (sigma)", "0", ("0.1", Case(sigma=0.1)), ("0.3", Case(sigma=0.3))),
    Input("burstiness (CV of gaps)", "1", ("0.5", Case(cv=0.5)), ("3", Case(cv=3.0))),
    Input("length tail", "x1", ("x0.5", Case(tail=0.5)), ("x2", Case(tail=2.0))),
    Input("KV pool", "29,205 blocks", ("3,650", Case(kv_blocks=3650)), ("1,000,000", Case(kv_blocks=10**6))),
)


@cache
def _latency(costs: tuple[tuple[str, float], ...]) -> LatencyModel:
    return LatencyModel(replace(load_profile("llama3-8b", "a100"), **dict(costs)))


def workload(case: Case, rate_rps: float, num_requests: int, seed: int) -> list[Request]:
    """The requests of a case; the same lengths whatever the rate and the burstiness."""
    requests = mixed(
        rate_rps=rate_rps,
        num_requests=num_requests,
        seed=seed,
        arrivals="poisson" if case.cv == 1.0 else {"gamma": {"cv": case.cv}},
    )
    if case.tail == 1.0:
        return requests
    classes = {one.slo_class for one in requests}
    edges = {
        name: float(np.quantile([one.prompt_tokens for one in requests if one.slo_class == name], TAIL_LEVEL))
        for name in classes
    }

    def stretched(one: Request) -> Request:
        beyond = one.prompt_tokens - edges[one.slo_class]
        return replace(one, prompt_tokens=round(edges[one.slo_class] + case.tail * beyond)) if beyond > 0.0 else one

    return [stretched(one) for one in requests]


def checked(result: Result) -> dict[str, Any]:
    """No figure: the laws of every run are checked."""
    check_result(result)
    return {}


def _cell(case: Case) -> dict[str, Any]:
    """A case as what stands in place of the configured groups."""
    return {
        "workload": partial(workload, case),
        "latency": _latency(case.costs),
        "predictor": partial(Noisy, bias=case.bias, sigma=case.sigma) if case.bias or case.sigma else Exact,
        "cluster": PrefillOnly(kv_blocks=case.kv_blocks),
    }


def measured(cases: Sequence[Case], num_requests: int = NUM_REQUESTS) -> list[tuple[float, float]]:
    """Goodput in req/s, and attainment at `RATE_RPS`, of each case; every run's laws are checked."""
    grid = {"case": {place: _cell(case) for place, case in enumerate(cases)}}
    overrides = ["policy=flowprefill", f"workload.num_requests={num_requests}", f"workload.rate_rps={RATE_RPS}"]
    options: dict[str, Any] = {"seeds": SEEDS, "measure": checked}
    found = flowsim.goodput(overrides, grid, target=TARGET, start_rps=1.0, precision=PRECISION, **options).table
    at_rate = flowsim.sweep(overrides, grid, **options).groupby("case").attainment.mean()
    return list(zip(found.goodput_rps.tolist(), at_rate[found["case"]].tolist(), strict=True))


@dataclass(frozen=True)
class Swing:
    """What an input's two settings do; pairs are (goodput in req/s, attainment)."""

    input: Input
    low: tuple[float, float]
    high: tuple[float, float]

    def width(self, measure: int, base: float) -> float:
        return max(abs(self.low[measure] - base), abs(self.high[measure] - base))


def tornado(num_requests: int = NUM_REQUESTS) -> tuple[tuple[float, float], list[Swing]]:
    """The documented run and every input's swing, the widest in goodput first."""
    base, *found = measured([Case(), *(case for one in INPUTS for _, case in (one.low, one.high))], num_requests)
    swings = [Swing(one, found[2 * place], found[2 * place + 1]) for place, one in enumerate(INPUTS)]
    return base, sorted(swings, key=lambda one: -one.width(0, base[0]))


HEADER = ("input", "documented", "low", "high", "goodput low", "goodput high", "attained low", "attained high")


def rows(swings: Sequence[Swing]) -> list[list[str]]:
    """The table of swings as text."""
    return [
        [one.input.name, one.input.base, one.input.low[0], one.input.high[0]]
        + [f"{side[0]:.2f}" for side in (one.low, one.high)]
        + [f"{100 * side[1]:.1f} %" for side in (one.low, one.high)]
        for one in swings
    ]


def draw(base: tuple[float, float], swings: Sequence[Swing], folder: Path = IMAGES) -> list[Path]:
    """The two tornado plots; returns their paths."""
    from matplotlib.figure import Figure

    measures = (("goodput", "goodput at 90 % attainment [requests/s]", 1.0), ("attainment", _AT_RATE, 100.0))
    paths = []
    with style():
        for place, (name, label, scale) in enumerate(measures):
            figure = Figure(figsize=(6.4, 3.9), layout="constrained")
            _bars(figure.subplots(), place, scale * base[place], scale, swings)
            figure.axes[0].set_xlabel(label)
            paths.append(folder / f"sensitivity_{name}.png")
            figure.savefig(paths[-1], dpi=150)
    return paths


_AT_RATE = f"requests that meet their TTFT SLO at {RATE_RPS:g} requests/s [%]"


def _bars(axes: Any, measure: int, base: float, scale: float, swings: Sequence[Swing]) -> None:
    """A pair of bars for each input: its low setting above, its high one below."""
    ordered = sorted(swings, key=lambda one: one.width(measure, base / scale))
    looks = (("low", 0.19, "white", "////"), ("high", -0.19, "0.35", ""))
    for place, one in enumerate(ordered):
        sides = ((one.low[measure], one.input.low[0]), (one.high[measure], one.input.high[0]))
        for (value, words), (label, up, colour, hatch) in zip(sides, looks, strict=True):
            beyond, at = scale * value - base, place + up
            name = label if place == 0 else None
            axes.barh(at, beyond, left=base, height=0.36, color=colour, edgecolor="0.2", hatch=hatch, label=name)
            axes.annotate(
                words,
                (base + beyond, at),
                xytext=(-4 if beyond < 0.0 else 4, 0),
                textcoords="offset points",
                ha="right" if beyond < 0.0 else "left",
                va="center",
                fontsize=7.5,
            )
    axes.axvline(base, color="black", linewidth=1.0)
    axes.set_yticks(range(len(ordered)), [f"{one.input.name}\n({one.input.base})" for one in ordered], fontsize=8)
    axes.margins(x=0.16)
    axes.set_axisbelow(True)
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower left", fontsize=8)


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=NUM_REQUESTS)
    options = parser.parse_args(arguments)
    base, swings = tornado(options.num_requests)
    draw(base, swings)
    title = f"documented: {base[0]:.2f} req/s, {100 * base[1]:.1f} % at {RATE_RPS:g} req/s"
    show(Console(width=None if sys.stdout.isatty() else 160), title, HEADER, rows(swings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
