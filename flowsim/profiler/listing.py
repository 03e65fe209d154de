"""`python -m flowsim.profiler list`: every shipped profile, a line for each model, GPU and TP degree."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from flowsim.names import shipped
from flowsim.profile import available_profiles

__all__ = ["configure", "run"]

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `list`: those that narrow it."""
    parser.add_argument("--model", help="this model only")
    parser.add_argument("--gpu", help="this GPU only")


def run(options: argparse.Namespace) -> int:
    """Prints the table; answers 0, or 1 where nothing is left to print."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in (
        "model",
        "gpu",
        "tp",
        "operators",
        "estimated",
        "mean error",
        "worst error",
        "worst operator",
        "source",
    ):
        table.add_column(title, justify="right" if "error" in title or title in ("tp", "operators") else "left")
    rows = [row for row in _rows() if options.model in (None, row[0]) and options.gpu in (None, row[1])]
    for row in rows:
        table.add_row(*row)
    console = Console()
    console = Console(width=max(console.width, 160)) if not console.is_terminal else console
    console.print(table)
    return 0 if rows else 1


def _rows() -> Iterator[tuple[str, ...]]:
    for model, gpus in available_profiles().items():
        for gpu in gpus:
            path = shipped("profiles") / model / f"{gpu}.yaml"
            profile = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
            for tp, degree in profile["tp"].items():
                yield (model, gpu, str(tp), *_errors(degree["operators"]))


def _errors(operators: list[Mapping[str, Any]]) -> tuple[str, ...]:
    """How many operators, how many of them estimated, the mean and the worst held-out error, and the sources."""
    fitted = [one for one in operators if "fit" in one]
    errors = {str(one["name"]): float(one["fit"]["heldout_mape"]) for one in fitted}
    worst = max(errors, key=lambda name: errors[name], default="")
    words = list(dict.fromkeys(str(one["source"]).split()[0] for one in operators))
    mean = f"{100 * sum(errors.values()) / len(errors):.1f} %" if errors else ""
    most = f"{100 * errors[worst]:.1f} %" if errors else ""
    return str(len(operators)), str(len(operators) - len(fitted)), mean, most, worst, ", ".join(words)
