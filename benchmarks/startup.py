"""What a command takes from start to end: `python -m benchmarks.startup`. Medians over turns, wall and processor."""

from __future__ import annotations

import argparse
import sys
import tempfile
from statistics import median

from benchmarks.timed import run

COMMANDS = {
    "--help": ["--help"],
    "1000 requests, no plots": ["workload.num_requests=1000", "report=none"],
    "1000 requests, plots": ["workload.num_requests=1000"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    print(f"{'command':<26} {'wall s':>7} {'cpu s':>7}")
    for name, arguments in COMMANDS.items():
        turns = []
        for _ in range(options.turns):
            with tempfile.TemporaryDirectory() as folder:
                out = [] if arguments == ["--help"] else [f"hydra.run.dir={folder}", "quiet=true"]
                turns.append(run([sys.executable, "-m", "flowsim", *arguments, *out]))
        print(f"{name:<26} {median(one.wall_s for one in turns):7.2f} {median(one.cpu_s for one in turns):7.2f}")


if __name__ == "__main__":
    main()
