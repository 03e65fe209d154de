"""How fast `simulate` is beside SimPy itself: `python -m benchmarks.simulate`.

Each turn times bare SimPy timeouts, then a simulation of workload `mixed` under `flowprefill` (Llama-3-8B, A100), in
seconds of processor time of one core, and prints requests per second, timeouts per second and their ratio. The
medians over the turns are at the end; the ratio is what can be compared between machines.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median
from time import process_time

import simpy

from flowsim import ComposedPolicy, LatencyModel, SLOAware, load_profile, simulate
from flowsim.workload import mixed


def timeouts_per_s(count: int = 300_000) -> float:
    """Bare timeouts that SimPy gets through in a second."""
    env = simpy.Environment()

    def ticking() -> Iterator[simpy.Event]:
        for _ in range(count):
            yield env.timeout(1.0)

    env.process(ticking())
    began_s = process_time()
    env.run()
    return count / (process_time() - began_s)


def requests_per_s(rate_rps: float, num_requests: int) -> float:
    """Requests that `simulate` gets through in a second."""
    requests = mixed(rate_rps=rate_rps, num_requests=num_requests)
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    began_s = process_time()
    simulate(requests, policy=ComposedPolicy("slack_edf", SLOAware(), "operator"), latency=latency)
    return num_requests / (process_time() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-requests", type=int, default=100_000)
    parser.add_argument("--rates", type=float, nargs="*", default=[6.0, 24.0])
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    print(f"{'rate':>5} {'requests/s':>11} {'timeouts/s':>11} {'ratio':>7}")
    for rate_rps in options.rates:
        turns = []
        for _ in range(options.turns):
            bare, ours = timeouts_per_s(), requests_per_s(rate_rps, options.num_requests)
            turns.append((ours, bare, ours / bare))
            print(f"{rate_rps:5g} {ours:11.0f} {bare:11.0f} {ours / bare:7.4f}")
        ours, bare, ratio = (median(column) for column in zip(*turns, strict=True))
        print(f"{rate_rps:5g} {ours:11.0f} {bare:11.0f} {ratio:7.4f}  median")


if __name__ == "__main__":
    main()
