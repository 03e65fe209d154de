"""How fast clusters that decode are simulated: `python -m benchmarks.serving`.

Requests per second of processor time of one core, with a mean of 200 output tokens (exponential), and simulator events
a request: for a disaggregated cluster (`cluster=pd`: an event for an arrival or a departure of a decode instance) and
for a colocated engine (`cluster=colocated`, `policy=vllm`: an event a step). The loads are what the clusters carry: one
prefill and one decode instance, and one engine, of Llama-3-8B on an A100. Building the result's tables counts.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from statistics import median
from time import process_time

from flowsim.config import build, compose
from flowsim.workload import lognormal

CLUSTERS = {
    "pd": (["cluster=pd", "policy=flowprefill"], 5.0),
    "colocated": (["cluster=colocated", "policy=vllm"], 3.0),
}
PROMPT_TOKENS, OUTPUT_TOKENS = 600, 200


def run_s(name: str, rate_rps: float, num_requests: int) -> tuple[float, float]:
    """Seconds of processor time of one run, and its events a request."""
    overrides, _ = CLUSTERS[name]
    setup = build(compose([*overrides, "workload.num_requests=1"]))
    prompts = lognormal(rate_rps=rate_rps, num_requests=num_requests, mean_tokens=PROMPT_TOKENS)
    stream = random.Random(0)
    requests = [
        replace(request, output_tokens=1 + int(stream.expovariate(1.0 / (OUTPUT_TOKENS - 1)))) for request in prompts
    ]
    began_s = process_time()
    result = replace(setup, requests=requests).run()
    return process_time() - began_s, result.run["events"] / num_requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-requests", type=int, default=5000)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    print(f"{'cluster':>10} {'rate':>5} {'requests/s':>11} {'events/request':>15}")
    for name, (_, rate_rps) in CLUSTERS.items():
        turns = [run_s(name, rate_rps, options.num_requests) for _ in range(options.turns)]
        print(
            f"{name:>10} {rate_rps:5g} {options.num_requests / median(s for s, _ in turns):11.0f} {turns[0][1]:15.2f}"
        )


if __name__ == "__main__":
    main()
