"""Goodput of every shipped policy: `python -m experiments.goodput_by_policy` (about three minutes on two cores).

Workload `mixed`, Llama-3-8B on one A100, 5000 requests run to drain, seeds 0 to 2 with common random numbers.
Goodput is the highest rate at which at least 90 % of all requests, in the mean of the seeds, meet their TTFT SLO,
found by bisection to 1 % (attainment is taken to fall with the rate).
"""

from __future__ import annotations

import argparse

import flowsim
from flowsim.report.terminal import StudyProgress
from flowsim.variants import choices_of

SEEDS = (0, 1, 2)
TARGET = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-requests", type=int, default=5000)
    parser.add_argument("--policies", nargs="*", default=choices_of("policy"))
    parser.add_argument("--bound", action="store_true", help="also each policy's share of the best possible; slow")
    parser.add_argument("--folder", help="where finished runs are kept; a rerun does only what is missing")
    options = parser.parse_args()
    with StudyProgress() as progress:
        found = flowsim.goodput(
            [f"workload.num_requests={options.num_requests}"],
            {"policy": options.policies},
            target=TARGET,
            seeds=SEEDS,
            start_rps=1.0,
            bound=options.bound,
            folder=options.folder,
            progress=progress,
        )
    print(f"goodput at {TARGET:.0%} attainment, {options.num_requests} requests, seeds {SEEDS}, 95 % interval")
    for row in found.table.itertuples():
        interval = f"{row.goodput_rps_low:.2f} to {row.goodput_rps_high:.2f}"
        share = f", {row.bound_share:.0%} of {row.bound_rps:.2f}" if options.bound else ""
        print(f"{row.policy:14} {row.goodput_rps:6.2f} req/s ({interval}){share}")


if __name__ == "__main__":
    main()
