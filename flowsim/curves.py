"""Sums of a profile's curves in the tokens of a batch, and one of several ranks' share of a layer's experts.

Knows profiles; no batches and no timelines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from flowsim.profile import BOUNDARIES, REDUCED, Dense, Experts

__all__ = ["line", "merge", "shared"]


def shared(experts: Experts, ranks: int) -> Experts:
    """A rank's share of a layer's experts, as a curve in the tokens of all ranks: of n tokens n / ranks are its own."""
    curve = experts.curve
    if ranks == 1:
        return experts
    knots = tuple(knot * ranks for knot in curve.knots_tokens)
    slopes = tuple(slope / ranks for slope in curve.slopes_s_per_token)
    return replace(experts, curve=replace(curve, knots_tokens=knots, slopes_s_per_token=slopes))


def merge(dense: Sequence[Dense], all_reduce: Sequence[Dense]) -> tuple[list[int], list[list[tuple[float, float]]]]:
    """All curves summed per boundary, and the all-reduces per boundary that has one, on one common set of knots.

    Returns the knots, and for each of the `len(knots) + 1` segments the (start, slope) line of every sum:
    `bisect_left(knots, n)` names the segment of n tokens (a knot belongs to the segment below it).
    """
    curves = [(BOUNDARIES.index(one.boundary), one) for one in dense]
    curves += [(len(BOUNDARIES) + REDUCED.index(one.boundary), one) for one in all_reduce]
    knots = sorted({knot for _, one in curves for knot in one.knots_tokens})
    segments = []
    for low in [0, *knots]:
        lines = [(0.0, 0.0)] * (len(BOUNDARIES) + len(REDUCED))
        for place, one in curves:
            start_s, slope_s = line(one, low)
            lines[place] = (lines[place][0] + start_s, lines[place][1] + slope_s)
        segments.append(lines)
    return knots, segments


def line(one: Dense, above_tokens: int) -> tuple[float, float]:
    """The line (start, slope) that a dense curve follows just above a number of tokens."""
    edges = [0, *one.knots_tokens]
    segment = sum(knot <= above_tokens for knot in one.knots_tokens)
    widths = [high - low for low, high in pairwise(edges)]
    steps_s = [slope * width for slope, width in zip(one.slopes_s_per_token, widths, strict=False)]
    reached_s = list(accumulate(steps_s, initial=one.constant_s))[segment]
    slope_s = one.slopes_s_per_token[segment]
    return reached_s - slope_s * edges[segment], slope_s
