"""How time and memory grow: `python -m benchmarks.scale`: runs of `mixed` at 6 requests/s, each a process.

Printed for each number of requests: seconds of processor time of `simulate` alone, and the peak memory of the process,
the workload and the result's tables included; then how many times as long each takes as the one before it, and the
median over the turns of how many times as long the last takes. `--keep all requests sample summary` compares what is
kept.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from statistics import median
from time import process_time

from benchmarks.timed import run


def one(count: int, keep: str) -> None:
    """In the child: one run."""
    from flowsim import ComposedPolicy, LatencyModel, SLOAware, load_profile, simulate
    from flowsim.workload import mixed

    requests = mixed(rate_rps=6.0, num_requests=count)
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    began_s = process_time()
    policy = ComposedPolicy("slack_edf", SLOAware(), "operator")
    result = simulate(requests, policy=policy, latency=latency, keep=keep)
    print(json.dumps({"cpu_s": process_time() - began_s, "attainment": result.summary()["attainment"]}))


def turn(counts: list[int], keep: str) -> float:
    """A run of each count, printed; how many times as long the last took as the one before it."""
    growth, before_s = math.nan, math.nan
    for count in counts:
        timed = run([sys.executable, "-m", "benchmarks.scale", "--one", str(count), "--keep", keep])
        cpu_s = json.loads(timed.output)["cpu_s"]
        growth, before_s = cpu_s / before_s, cpu_s
        shown = "" if math.isnan(growth) else f"{growth:9.2f}"
        row = f"{keep:<9} {count:9d} {cpu_s:11.1f} {count / cpu_s:11.0f} {timed.peak_bytes / 1e6:8.0f} {shown}"
        print(row.rstrip(), flush=True)
    return growth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--keep", nargs="*", default=["all"])
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one, *options.keep)
        return
    print(f"{'keep':<9} {'requests':>9} {'simulate s':>11} {'requests/s':>11} {'peak MB':>8} {'x before':>9}")
    for keep in options.keep:
        growths = [turn(options.counts, keep) for _ in range(options.turns)]
        if len(options.counts) > 1:
            print(f"{keep:<9} {'median over the turns':>30} {'':>8} {median(growths):9.2f}")


if __name__ == "__main__":
    main()
