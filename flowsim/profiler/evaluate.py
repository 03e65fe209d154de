"""Seconds of a profile's operators, straight from the entries of its file: for reports, checks and tests.

The simulator has its own, faster arithmetic (`flowsim.latency`); a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

__all__ = ["experts_touched", "layer_seconds", "operator_seconds", "pass_seconds"]

Entry = Mapping[str, Any]
ONCE = ("head", "tail")
PREFILL_KINDS = ("dense", "attention", "experts", "all_reduce", "per_sequence")


def experts_touched(experts: float, per_token: float, tokens: float) -> float:
    """Expected distinct experts that `tokens` tokens reach under uniform routing, `per_token` of them each."""
    return float(experts * (1.0 - (1.0 - per_token / experts) ** tokens))


def operator_seconds(entry: Entry, new_tokens: float, cached_tokens: float = 0.0, sequences: int = 1) -> float:
    """One call of a prefill operator: on `new_tokens` of a single part, or on `sequences` for a `per_sequence` one."""
    kind = entry["kind"]
    if kind == "attention":
        c, p, wide = new_tokens, cached_tokens, max(new_tokens, entry.get("floor_tokens", 0))
        terms = {"1": 1.0, "c": c, "c*c": c * c, "c*p": wide * p, "p": p, "f": wide}
        return float(sum(value * terms[name] for name, value in entry["coefficients"].items()))
    if kind == "per_sequence":
        return _pieces(entry["constant_s"], entry["knots_sequences"], entry["slopes_s_per_sequence"], sequences)
    seconds = _pieces(entry["constant_s"], entry["knots_tokens"], entry["slopes_s_per_token"], new_tokens)
    if kind == "experts":
        seconds += entry["expert_s"] * experts_touched(entry["experts"], entry["experts_per_token"], new_tokens)
    return seconds


def layer_seconds(
    profile: Entry, tp: int, new_tokens: float, cached_tokens: float = 0.0, keep: Callable[[Entry], bool] = bool
) -> float:
    """The operators of one layer that `keep` is true of."""
    return sum(
        operator_seconds(entry, new_tokens, cached_tokens)
        for entry in profile["tp"][tp]["operators"]
        if entry["kind"] in PREFILL_KINDS and entry["boundary"] not in ONCE and keep(entry)
    )


def pass_seconds(
    profile: Entry, tp: int, new_tokens: float, cached_tokens: float = 0.0, keep: Callable[[Entry], bool] = bool
) -> float:
    """The operators of a pass of one part that `keep` is true of: all layers, head and tail, no overheads."""
    once = sum(
        operator_seconds(entry, new_tokens, cached_tokens)
        for entry in profile["tp"][tp]["operators"]
        if entry["kind"] in PREFILL_KINDS and entry["boundary"] in ONCE and keep(entry)
    )
    return once + int(profile["shapes"]["layers"]) * layer_seconds(profile, tp, new_tokens, cached_tokens, keep)


def _pieces(constant_s: float, knots: list[int], slopes: list[float], count: float) -> float:
    edges = [0.0, *knots, max(float(count), *knots, 0.0) if knots else float(count)]
    inside = [max(0.0, min(count, high) - low) for low, high in pairwise(edges)]
    return float(constant_s + sum(slope * n for slope, n in zip(slopes, inside, strict=True)))
