"""How busy a sweep keeps its workers: `python -m benchmarks.sweep`: 64 cells of about a second each.

Printed: the runs' own seconds, each timed in its worker, over the seconds of the whole sweep times workers. What is
missing from 1 is composing, starting the workers, handing out, and the end, when one worker has nothing left. Other
processes on the machine lengthen both sides.
"""

from __future__ import annotations

import argparse
import os
from time import perf_counter

from flowsim.study.cells import cells_of
from flowsim.study.runs import Runs
from flowsim.study.workers import Workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=64)
    parser.add_argument("--requests", type=int, default=20_000, help="of each cell")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args()
    rates_rps = [2.0 + 6.0 * cell / options.cells for cell in range(options.cells)]
    began_s = perf_counter()
    cells = cells_of([f"workload.num_requests={options.requests}"], {"workload.rate_rps": rates_rps})
    with Workers(jobs=options.jobs) as workers:
        runs = Runs(workers).of([(cell, 0) for cell in cells])
    took_s = perf_counter() - began_s
    own_s = sum(run.record.wall_s for run in runs)
    print(
        f"{options.cells} cells, {own_s / options.cells:.2f} s each, {options.jobs} workers: {took_s:.1f} s, "
        f"workers busy {own_s / (took_s * options.jobs):.1%}"
    )


if __name__ == "__main__":
    main()
