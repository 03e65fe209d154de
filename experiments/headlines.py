"""The published headline figures of FlowPrefill (arXiv 2602.16603) beside what the simulator gives.

Workload `mixed`, Llama-3-8B, the same random numbers for every policy. The baselines are DistServe with chunked
prefill of 2048 and 8192 tokens: `chunked_2k` and `chunked_8k`. Goodput is the highest rate at which at least 90 % of
the requests meet their TTFT SLO.
"""

from __future__ import annotations

from dataclasses import dataclass

import flowsim
from experiments.sensitivity import SEEDS, TARGET, checked
from flowsim import LatencyModel, load_profile, simulate
from flowsim.config import compose, make
from flowsim.predictor import GRID_TOKENS, Poly3
from flowsim.workload import mixed

GPUS = ("a800", "a100")
POLICIES = ("flowprefill", "chunked_2k", "chunked_8k")
NUM_REQUESTS = 2000
RATE_RPS = 2.0  # where SLO scales are compared: within what every policy can serve
PUBLISHED_RATIO = (4.7, 5.6)
PUBLISHED_STRICTER = (1.5, 3.1)
FROM_TOKENS = 64


@dataclass(frozen=True)
class Headlines:
    """Goodput in req/s by (GPU, policy); the tightest SLO scale at `RATE_RPS` by policy on the A800; poly3's mean
    relative error from 64 tokens on; real scheduler seconds over simulated busy seconds."""

    goodput_rps: dict[tuple[str, str], float]
    slo_scale: dict[str, float]
    prediction_error: float
    scheduler_share: float

    def ratio(self, gpu: str, policy: str) -> float:
        return self.goodput_rps[gpu, "flowprefill"] / self.goodput_rps[gpu, policy]


def goodputs(num_requests: int = NUM_REQUESTS) -> dict[tuple[str, str], float]:
    """Requests a second by (GPU, policy)."""
    found = flowsim.goodput(
        [f"workload.num_requests={num_requests}"],
        {"gpu": GPUS, "policy": POLICIES},
        target=TARGET,
        seeds=SEEDS,
        start_rps=1.0,
        measure=checked,
    ).table
    return {(row.gpu, row.policy): row.goodput_rps for row in found.itertuples()}


def tightest_scales(num_requests: int = NUM_REQUESTS) -> dict[str, float]:
    """The smallest SLO scale of each policy that keeps the target at `RATE_RPS` on an A800, to 2 %."""
    found = flowsim.slo_scale(
        [f"workload.num_requests={num_requests}", f"workload.rate_rps={RATE_RPS}", "gpu=a800"],
        {"policy": POLICIES},
        scales=(0.05, 4.0),
        target=TARGET,
        seeds=SEEDS,
        precision=0.02,
        measure=checked,
    ).table
    return dict(zip(found.policy, found.slo_scale, strict=True))


def prediction_error() -> float:
    """Poly3's mean relative error at the reference's grid from 64 tokens on."""
    latency = LatencyModel(load_profile("llama3-8b", "a800"))
    predictor = Poly3(latency)
    grid = [tokens for tokens in GRID_TOKENS if tokens >= FROM_TOKENS]
    return sum(abs(predictor.alone_s(n) / latency.isolated_s(n) - 1.0) for n in grid) / len(grid)


def scheduler_share(num_requests: int = NUM_REQUESTS) -> float:
    """Of flowprefill at 6 req/s on an A800, in this simulator's Python."""
    policy = make(compose(["policy=flowprefill"]), "policy")
    latency = LatencyModel(load_profile("llama3-8b", "a800"))
    result = simulate(mixed(rate_rps=6.0, num_requests=num_requests, seed=0), policy=policy, latency=latency)
    return float(result.summary()["scheduler"]["share"])


def headlines(num_requests: int = NUM_REQUESTS) -> Headlines:
    """All of them."""
    return Headlines(goodputs(num_requests), tightest_scales(num_requests), prediction_error(), scheduler_share())
