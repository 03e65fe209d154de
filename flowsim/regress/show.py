"""What moved, as a table for the terminal and as Markdown for a pull request."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flowsim.regress.compare import Move, Verdict, counts
from flowsim.regress.suite import Figure, Suite

__all__ = ["as_text", "headline", "markdown", "table"]

COLUMNS = ("policy", "workload", "figure", "recorded", "now", "change", "allowed", "seeds", "")
NUMBERS = COLUMNS[3:8]


def headline(moves: Sequence[Move], suite: Suite) -> str:
    """One sentence: how much was compared, and how much of it moved."""
    of = f"policies {len(suite.policies)}, workloads {len(suite.workloads)}, seeds {len(suite.seeds)}"
    if not moves:
        return f"Nothing moved: {of}."
    return ", ".join(f"{count} {verdict.value}" for verdict, count in counts(moves).items()) + f": {of}."


def table(moves: Sequence[Move], *, shown: int = 60) -> Table:
    """The moves for a terminal: `shown` of them at most, and how many more there are."""
    answer = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in COLUMNS:
        answer.add_column(column, justify="right" if column in NUMBERS else "left", no_wrap=True)
    for move in moves[:shown]:
        answer.add_row(*_cells(move), style="" if move.verdict.fails else "dim")
    if len(moves) > shown:
        answer.add_row(f"... {len(moves) - shown} more")
    return answer


def markdown(moves: Sequence[Move], suite: Suite, *, shown: int = 200) -> str:
    """The moves for a pull request's comment: what fails in the open, the rest folded away."""
    lines = [f"**flowsim baseline.** {headline(moves, suite)}", ""]
    failing = [move for move in moves if move.verdict.fails]
    rest = [move for move in moves if not move.verdict.fails]
    lines += _markdown_table(failing[:shown])
    if len(failing) > shown:
        lines += [f"... and {len(failing) - shown} more that fail.", ""]
    if rest:
        lines += [f"<details><summary>{len(rest)} that do not fail</summary>", ""]
        lines += [*_markdown_table(rest[:shown]), "</details>", ""]
    return "\n".join(lines)


def as_text(moves: Sequence[Move]) -> str:
    """The table as plain text, as wide as it needs to be."""
    console = Console(file=io.StringIO(), width=200, color_system=None)
    with console.capture() as captured:
        console.print(table(moves))
    return "\n".join(line.rstrip() for line in captured.get().strip("\n").splitlines())


def _markdown_table(moves: Sequence[Move]) -> list[str]:
    if not moves:
        return []
    header = [column or "verdict" for column in COLUMNS]
    rule = ["--:" if column in NUMBERS else "---" for column in COLUMNS]
    rows = [header, rule, *(_cells(move) for move in moves)]
    return ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows] + [""]


def _cells(move: Move) -> list[str]:
    change = "" if move.change is None else f"{100 * move.change:+.3g} %"
    if move.name.startswith("attainment") and move.recorded is not None and move.now is not None:
        change = f"{100 * (move.now - move.recorded):+.3g} points"
    compared = move.recorded is not None or move.now is not None
    allowed = str(move.allowed) if compared and move.verdict not in (Verdict.NEW, Verdict.GONE) else ""
    recorded, now = _pair(move.recorded, move.now)
    seeds = f"{move.seeds} of {move.of_seeds}"
    return [move.policy, move.workload, move.name, recorded, now, change, allowed, seeds, move.verdict.value]


def _pair(recorded: Figure, now: Figure) -> tuple[str, str]:
    """Both in as few digits as tell them apart, four at least."""
    for digits in range(4, 17):
        before, after = _text(recorded, digits), _text(now, digits)
        if before != after or recorded == now:
            break
    return before, after


def _text(figure: Figure, digits: int) -> str:
    if figure is None:
        return "-"
    return str(figure) if isinstance(figure, int) else f"{figure:.{digits}g}"
