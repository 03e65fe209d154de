"""`python -m flowsim.profiler show MODEL GPU`: one profile, its operators, their errors and sources."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from flowsim.profile import load_profile
from flowsim.profiler.evaluate import PREFILL_KINDS, operator_seconds, pass_seconds

__all__ = ["configure", "run"]

TOKENS = (512, 2048, 8192)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `show`."""
    parser.add_argument("model", help="a shipped model, such as llama3-8b")
    parser.add_argument("gpu", help="a shipped GPU, such as a100, or the path of a profile")
    parser.add_argument("--tp", type=int, help="this TP degree only")


def run(options: argparse.Namespace) -> int:
    """Prints the profile; ValueError for an unknown one or a malformed file."""
    checked = load_profile(options.model, options.gpu)
    profile = yaml.safe_load(Path(checked.path).read_text(encoding="utf-8"))
    degrees = [options.tp] if options.tp else list(checked.tp_degrees)
    if not set(degrees) <= set(checked.tp_degrees):
        raise ValueError(f"tp={options.tp}: {checked.path} has tp {', '.join(map(str, checked.tp_degrees))}")
    console = Console()
    console = Console(width=max(console.width, 160)) if not console.is_terminal else console
    console.print(_head(profile))
    for tp in degrees:
        console.print(_operators(profile, tp))
        sums = ", ".join(f"{n} tokens {1e3 * pass_seconds(profile, tp, n):.1f} ms" for n in TOKENS)
        console.print(f"TP {tp}, operators of one pass: {sums}\n")
    for note in profile.get("notes", []):
        console.print(f"gap: {note}")
    return 0


def _head(profile: Mapping[str, Any]) -> str:
    overheads = "  ".join(f"{key} {1e3 * value:g} ms" for key, value in profile["overheads"].items())
    shapes = ", ".join(f"{key} {value}" for key, value in profile["shapes"].items())
    return (
        f"{profile['model']} on {profile['gpu']}: {profile['weights_bytes'] / 1e9:.1f} GB of weights, "
        f"{profile['gpu_memory_bytes'] / 2**30:.0f} GiB a GPU, {profile['kv_bytes_per_token']} bytes of KV a token\n"
        f"{shapes}\noverheads: {overheads}\n{profile.get('overheads_source', '')}\n"
    )


def _operators(profile: Mapping[str, Any], tp: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title=f"TP {tp}", title_justify="left")
    for title in ("operator", "boundary", "kind"):
        table.add_column(title)
    for title in (*(f"{n} tokens, us" for n in TOKENS), "measured", "mean error", "largest"):
        table.add_column(title, justify="right")
    table.add_column("source")
    for entry in profile["tp"][tp]["operators"]:
        fit = entry.get("fit", {})
        errors = [f"{100 * fit[key]:.1f} %" if fit else "-" for key in ("heldout_mape", "heldout_max_error")]
        measured = entry.get("measured_tokens") or entry["measured_sequences"]
        times = [_microseconds(entry, n) for n in TOKENS]
        row = (entry["name"], entry["boundary"], entry["kind"], *times, f"{measured[0]}-{measured[1]}", *errors)
        table.add_row(*row, str(entry["source"]))
    return table


def _microseconds(entry: Mapping[str, Any], tokens: int) -> str:
    return f"{1e6 * operator_seconds(entry, tokens):.1f}" if entry["kind"] in PREFILL_KINDS else ""
