"""What a search for goodput takes from start to end: `python -m benchmarks.search`.

The command `task=goodput` of `mixed` under `flowprefill` (Llama-3-8B, A100), 5000 requests, three seeds at every rate,
to a precision at which it tries nine rates. Each turn is a process of its own, start-up and result files included,
once with one worker and once with two; printed are medians over turns, in seconds of processor time of all its
processes together and of the wall clock.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.timed import Timed, run

SEARCH = [
    "task=goodput", "policy=flowprefill", "workload=mixed", "workload.num_requests=5000", "report=none",
    "task.start_rps=4", "task.precision=0.02", "quiet=true",
]  # fmt: skip


def turn(jobs: int) -> tuple[Timed, int, int]:
    """One search: what it took, how many rates it tried, and in how many runs."""
    with tempfile.TemporaryDirectory() as folder:
        timed = run([sys.executable, "-m", "flowsim", *SEARCH, f"task.jobs={jobs}", f"hydra.run.dir={folder}"])
        with (Path(folder) / "evaluations.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    return timed, len({row["workload.rate_rps"] for row in rows}), len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    print(f"{'workers':>7} {'rates':>6} {'runs':>5} {'processor s':>12} {'lowest':>7} {'highest':>8} {'wall s':>7}")
    for jobs in options.jobs:
        turns = [turn(jobs) for _ in range(options.turns)]
        cpu_s = [timed.cpu_s for timed, _, _ in turns]
        print(
            f"{jobs:7d} {turns[0][1]:6d} {turns[0][2]:5d} {median(cpu_s):12.1f} {min(cpu_s):7.1f} {max(cpu_s):8.1f} "
            f"{median(timed.wall_s for timed, _, _ in turns):7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
