"""flowsim beside sched-sim, the same work in the same turn: `python -m benchmarks.peers --peer-python PYTHON`.

PYTHON is the interpreter of an environment in which `pip install sched-sim` was run. Each turn runs the two one after
the other for each number of requests; printed are medians over the turns, and the median of the ratios within a turn.
Rates are requests per second of processor time, of the whole process and of the simulation alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

from benchmarks.simulate import timeouts_per_s
from benchmarks.timed import run

HERE = Path(__file__).parent
OURS = ("flowprefill", "chunked_2k")


def turn(count: int, peer_python: str) -> dict[str, dict[str, float]]:
    """What each simulator takes for so many requests, one after the other."""
    commands = {name: [sys.executable, "-m", "benchmarks.one_flowsim", name, str(count)] for name in OURS}
    commands["sched-sim"] = [peer_python, str(HERE / "one_sched_sim.py"), str(count)]
    found = {}
    for name, command in commands.items():
        timed = run(command, cwd=str(HERE.parent))
        loop = json.loads(timed.output)
        found[name] = {
            "process_rps": count / timed.cpu_s,
            "loop_rps": count / loop["cpu_s"],
            "wall_s": timed.wall_s,
            "loop_wall_s": loop["wall_s"],
            "peak_mb": timed.peak_bytes / 1e6,
            "utilisation": loop["utilisation"],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--counts", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    print(f"SimPy: {median(timeouts_per_s() for _ in range(options.turns)):.0f} bare timeouts/s")
    print(f"{'requests':>8} {'simulator':<12} {'process/s':>10} {'alone/s':>10} {'wall s':>8} {'alone s':>8} "
          f"{'peak MB':>8} {'busy':>6} {'process x':>10} {'alone x':>8}")  # fmt: skip
    for count in options.counts:
        turns = [turn(count, options.peer_python) for _ in range(options.turns)]
        for name in turns[0]:
            figures = {key: median(one[name][key] for one in turns) for key in turns[0][name]}
            process_x, alone_x = (
                median(one[name][key] / one["sched-sim"][key] for one in turns) for key in ("process_rps", "loop_rps")
            )
            print(f"{count:8d} {name:<12} {figures['process_rps']:10.0f} {figures['loop_rps']:10.0f} "
                  f"{figures['wall_s']:8.2f} {figures['loop_wall_s']:8.2f} {figures['peak_mb']:8.0f} "
                  f"{figures['utilisation']:6.2f} {process_x:10.2f} {alone_x:8.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
