"""`python -m flowsim.report RUN_DIR [RUN_DIR ...]`: a page on runs that are done, or several side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flowsim.report.html import load_runs, write_page
from flowsim.report.trace import checked_window

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m flowsim.report",
        description="Writes one HTML page on a run, or on several side by side; it needs no network to be viewed.",
    )
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", type=Path, help="the folder of a run (hydra.run.dir)")
    parser.add_argument("--out", type=Path, help="the page; report.html in the folder of one run, here for several")
    parser.add_argument(
        "--window-s", nargs=2, type=float, metavar=("FROM", "TO"), help="the seconds that the timeline shows first"
    )
    given = parser.parse_args(arguments)
    path = given.out or (given.runs[0] if len(given.runs) == 1 else Path()) / "report.html"
    try:
        window_s = checked_window(given.window_s)
        path.parent.mkdir(parents=True, exist_ok=True)
        print(write_page(load_runs(given.runs), path, window_s))
    except (OSError, ValueError) as error:
        print(f"flowsim.report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
