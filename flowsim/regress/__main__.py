"""The command: `python -m flowsim.regress --baseline FILE`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from flowsim.core import PolicyError
from flowsim.regress.baseline import Baseline, load, record
from flowsim.regress.compare import Move, compare, fails
from flowsim.regress.show import headline, markdown, table
from flowsim.regress.suite import Cell, Figures, measure

__all__ = ["main"]

DESCRIPTION = """\
Runs the suite that a baseline names and says which figures moved. docs/regress.md describes the file.
Exit status: 0 nothing that may not move has, 1 something has, 2 a mistake, 130 Ctrl-C."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares, or with `--update` records; answers the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m flowsim.regress",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--baseline", type=Path, required=True, metavar="FILE", help="the suite and its record")
    parser.add_argument("--update", action="store_true", help="write today's figures into FILE (needs --reason)")
    parser.add_argument("--reason", metavar="TEXT", help="why the figures may move; goes on record in FILE")
    parser.add_argument("--markdown", metavar="PATH", help="append what moved as Markdown to PATH (- for stdout)")
    options = parser.parse_args(arguments)
    if options.update != bool(options.reason):
        parser.error("--update and --reason TEXT go together: a baseline moves for a reason, which is kept in it")
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, AssertionError, PolicyError) as error:
        print(f"flowsim.regress: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    baseline = load(options.baseline)
    measured = _measured(baseline)
    moves = _moves(baseline, measured)
    if options.markdown == "-":
        print(markdown(moves, baseline.suite))
    else:
        console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
        if moves:
            console.print(table(moves))
        console.print(headline(moves, baseline.suite))
    if options.markdown not in (None, "-"):
        with Path(options.markdown).open("a", encoding="utf-8") as file:
            file.write(markdown(moves, baseline.suite))
    if options.update:
        record(baseline, measured, options.reason)
        print(f"{baseline.path} updated")
        return 0
    if fails(moves):
        again = f"python -m flowsim.regress --baseline {baseline.path} --update --reason '...'"
        print(f"If this is meant: {again}", file=sys.stderr)
    return 1 if fails(moves) else 0


def _measured(baseline: Baseline) -> dict[Cell, list[Figures]]:
    console = Console(stderr=True)
    suite = baseline.suite
    cells = track(suite.cells, "running the suite", console=console, transient=True, disable=not console.is_terminal)
    return {cell: measure(suite, cell) for cell in cells}


def _moves(baseline: Baseline, measured: dict[Cell, list[Figures]]) -> list[Move]:
    """Of all cells, those that fail first."""
    moves = []
    for cell, now in measured.items():
        moves += compare(cell, baseline.of(cell), now, baseline.tolerances)
    return sorted(moves, key=lambda move: not move.verdict.fails)


if __name__ == "__main__":
    sys.exit(main())
