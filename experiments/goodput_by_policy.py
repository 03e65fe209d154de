"""Goodput of every shipped policy: `python -m experiments.goodput_by_policy` (about three minutes on two cores).

Workload `mixed`, Llama-3-8B on one A100, 5000 requests run to drain, seeds 0 to 2 with common random numbers.
Goodput is the highest rate at which at least 90 % of all requests of the three seeds meet their TTFT SLO, found
by bisection to 1 % (attainment is taken to fall with the rate).
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor

from flowsim import LatencyModel, load_profile, simulate
from flowsim.config import CONF, compose, make
from flowsim.workload import mixed

SEEDS = (0, 1, 2)
TARGET = 0.9


def attainment(policy: str, rate_rps: float, num_requests: int) -> float:
    """Mean attainment over the seeds."""
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    shares = []
    for seed in SEEDS:
        requests = mixed(rate_rps=rate_rps, num_requests=num_requests, seed=seed)
        answer = simulate(requests, policy=make(compose([f"policy={policy}"]), "policy"), latency=latency)
        shares.append(answer.summary()["attainment"])
    return sum(shares) / len(shares)


def goodput(policy: str, num_requests: int) -> float:
    """The highest rate, in requests per second, that keeps the target."""
    low_rps, high_rps = 0.5, 1.0
    while attainment(policy, high_rps, num_requests) >= TARGET:
        low_rps, high_rps = high_rps, 2 * high_rps
    while high_rps / low_rps > 1.01:
        middle_rps = (low_rps * high_rps) ** 0.5
        if attainment(policy, middle_rps, num_requests) >= TARGET:
            low_rps = middle_rps
        else:
            high_rps = middle_rps
    return low_rps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-requests", type=int, default=5000)
    parser.add_argument("--policies", nargs="*", default=sorted(path.stem for path in (CONF / "policy").glob("*.yaml")))
    options = parser.parse_args()
    print(f"goodput at {TARGET:.0%} attainment, {options.num_requests} requests, seeds {SEEDS}")
    with ProcessPoolExecutor() as pool:
        found = pool.map(goodput, options.policies, [options.num_requests] * len(options.policies))
        for policy, rate_rps in zip(options.policies, found, strict=True):
            print(f"{policy:14} {rate_rps:6.2f} req/s", flush=True)


if __name__ == "__main__":
    main()
