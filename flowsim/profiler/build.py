"""A profile's file from an operator trace: every operator fitted at every TP degree, with provenance.

Knows the file's layout; the simulator reads it with `flowsim.profile`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from flowsim.profiler.entries import Fitted, fit_rows
from flowsim.profiler.models import Shapes
from flowsim.profiler.trace import OPERATORS

__all__ = ["Overheads", "build_profile", "default_overheads", "render"]

ONE_LINE = ("shapes", "overheads", "tp")  # keys whose innermost lists and mappings are written on one line
SHOWN = 5  # points left out that are named one by one
NEEDED = ("qkv_gemm", "attention", "o_proj_gemm")
MLP = (("gate_up_gemm", "down_gemm"), ("router_gemm", "experts"))
_TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Seconds that are no operator's, and where they are from."""

    pass_s: float
    request_s: float
    check_s: float
    switch_s: float
    source: str


def default_overheads(gpu: str, *, has_lm_head: bool) -> Overheads:
    """The overheads of a GPU, or those of any; `pass_s` leaves out lm_head and sampling where they are operators."""
    table = yaml.safe_load((_TABLES / "overheads.yaml").read_text(encoding="utf-8"))
    entry = dict(table["gpus"].get(gpu, table["default"]))
    lm_head_s = entry.pop("lm_head_s")
    if has_lm_head and lm_head_s:
        entry["pass_s"] = round(entry["pass_s"] - lm_head_s, 9)
        entry["source"] += f" {1e3 * lm_head_s:g} ms for lm_head and sampling are taken off pass_s: operators here."
    return Overheads(**entry)


def build_profile(
    trace: pd.DataFrame,
    shapes: Shapes,
    *,
    gpu_memory_bytes: int,
    overheads: Overheads,
    note: Callable[[str], None],
) -> tuple[dict[str, Any], list[Fitted]]:
    """The profile as plain data, numbers rounded to 7 digits, and its fits; `note` is told of what is left out.

    The trace holds one model on one GPU at one or more TP degrees.

    Raises:
        ValueError: several models or GPUs, an operator that a layer needs is missing, or a fit is impossible.
    """
    for column in ("model", "gpu"):
        if trace[column].nunique() != 1:
            raise ValueError(f"the trace holds several {column}s: {', '.join(sorted(trace[column].unique()))}; fit one")
    fits: list[Fitted] = []
    for tp in sorted(trace["tp"].unique().tolist()):
        rows = trace[trace["tp"] == tp]
        _check_complete(set(rows["operator"]), tp)
        for operator in OPERATORS:
            part = rows[rows["operator"] == operator]
            if not part.empty:
                fits += fit_rows(operator, part, shapes, partial(_tell, note, tp))
    for one in fits:
        for out in one.left_out[:SHOWN]:
            note(
                f"tp {one.tp}: {one.entry['name']}: left out the point at {out.tokens}: "
                f"{1e6 * out.latency_s:.1f} us where the fit says {1e6 * out.expected_s:.1f}"
            )
        if len(one.left_out) > SHOWN:
            note(f"tp {one.tp}: {one.entry['name']}: left out {len(one.left_out)} points in all; the report lists them")
    degrees: dict[int, dict[str, Any]] = {}
    for one in fits:
        degrees.setdefault(one.tp, {"operators": []})["operators"].append(one.entry)
    profile = {
        "version": 1,
        "model": str(trace["model"].iloc[0]),
        "gpu": str(trace["gpu"].iloc[0]),
        "gpu_memory_bytes": gpu_memory_bytes,
        "weights_bytes": shapes.weights_bytes,
        "kv_bytes_per_token": shapes.kv_bytes_per_token,
        "max_context_tokens": shapes.max_context_tokens,
        "shapes": _shapes(shapes),
        "overheads": {key: getattr(overheads, key) for key in ("pass_s", "request_s", "check_s", "switch_s")},
        "overheads_source": overheads.source,
        "software": ", ".join(dict.fromkeys(trace["software"])),
        "sources": _sources(trace),
        "tp": degrees,
    }
    return profile, fits


def render(profile: Mapping[str, Any], written_by: str) -> str:
    """The profile as the text of its file; the first line says what wrote it."""
    header = (
        f"# Written by: {written_by}\n"
        "# Seconds and tokens; the operators under a TP degree are those of one rank. Fit errors are fractions, held\n"
        "#   out (5 folds). The first word of an operator's `source` is a key of `sources`. See docs/profiles.md.\n"
    )
    blocks = [
        yaml.safe_dump({key: value}, sort_keys=False, default_flow_style=None if key in ONE_LINE else False, width=150)
        for key, value in profile.items()
    ]
    return header + "".join(blocks)


def _tell(note: Callable[[str], None], tp: int, text: str) -> None:
    note(f"tp {tp}: {text}")


def _check_complete(operators: set[str], tp: int) -> None:
    missing = [name for name in NEEDED if name not in operators]
    if not any(operators.issuperset(pair) for pair in MLP):
        missing.append(" and ".join(MLP[0]) + " (or " + " and ".join(MLP[1]) + ")")
    if missing:
        raise ValueError(f"tp {tp}: the trace has no rows of {', '.join(missing)}; a layer needs them")


def _shapes(shapes: Shapes) -> dict[str, int]:
    names = ["layers", "hidden_size", "q_heads", "kv_heads", "head_dim", "intermediate_size", "vocab_size"]
    if shapes.experts:
        names[5:6] = ["experts", "experts_per_token", "expert_intermediate_size"]
    return {name: getattr(shapes, name) for name in names}


def _sources(trace: pd.DataFrame) -> dict[str, Any]:
    """What the first words of the rows' sources stand for; those that are not known are this machine's own."""
    known = yaml.safe_load((_TABLES / "sources.yaml").read_text(encoding="utf-8"))
    words = list(dict.fromkeys(source.split()[0] for source in trace["source"].unique()))
    return {word: known.get(word, {"note": "measured by the software that `software` names"}) for word in words}
