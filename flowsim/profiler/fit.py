"""Fits piecewise-linear curves to measured operator latencies; reads and writes no file, knows no simulator.

Every fit is a non-negative least squares on relative errors (each point weighted by 1 / its latency), so a
microsecond operator at one token counts as much as a millisecond operator at eight thousand. Points far off any
smooth curve are left out and reported (`flowsim.profiler.robust`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from flowsim.profiler.robust import FitQuality, Floats, LeftOut, assess, folds, kept, relative_nnls

Knots = tuple[int, ...]

MAX_PIECES = 3
MIN_POINTS = 8  # distinct token counts a fit needs
MIN_POINTS_PER_PIECE = 3
MAX_KNOT_CANDIDATES = 20
TRIAL_KNOTS = 6  # of the curve that outliers are judged by
CORE_TOKENS = 256  # where a prefill's time is decided; the quality has the error from here on
PIECE_MARGIN = 0.10  # a further piece must lower the held-out MAPE by this share of it
NEGLIGIBLE_MAPE = 1e-6  # below it, differences are rounding and buy no piece
SLOPE_FLOOR = 1e-3  # smallest slope of a piece, as a share of max(latency) / max(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFit:
    """A continuous piecewise-linear latency in batch tokens: k knots cut k + 1 pieces, one slope each.

    Every slope is > 0 and the constant is >= 0, so more tokens always cost strictly more.
    """

    constant_s: float
    knots_tokens: Knots
    slopes_s_per_token: tuple[float, ...]
    quality: FitQuality

    def seconds(self, tokens: float) -> float:
        """Latency of one call on `tokens` batch tokens; beyond the measured range the last piece goes on."""
        edges = (0, *self.knots_tokens, math.inf)
        inside = (max(0.0, min(tokens, end) - start) for start, end in pairwise(edges))
        pieces = zip(self.slopes_s_per_token, inside, strict=True)
        return self.constant_s + sum(slope * n for slope, n in pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsFit:
    """The experts of one layer: a curve in tokens, plus `expert_s` for each distinct expert that is touched."""

    curve: DenseFit
    expert_s: float

    @property
    def quality(self) -> FitQuality:
        return self.curve.quality

    def seconds(self, tokens: float, touched: float) -> float:
        """Latency of one call on `tokens` tokens that touches `touched` experts."""
        return self.curve.seconds(tokens) + self.expert_s * touched


def fit_dense(
    operator: str, tokens: Sequence[float], latency_s: Sequence[float], *, core: int = CORE_TOKENS
) -> DenseFit:
    """Fit a token-wise operator (GEMM, norm, rope, activation, add, embedding, all-reduce) with one to three pieces.

    `tokens` and `latency_s` hold one measured call each, in any order; token counts may repeat. The number of
    pieces and the knots (among the measured token counts, at least 3 of them to a piece) have the least
    held-out error; a further piece is taken only if it lowers the held-out MAPE by a tenth. `core` is where the
    quality's core error begins. Raises ValueError, naming operator and point, for a latency that is not finite
    and positive, for a token count that is not a positive whole number, and for fewer than 8 distinct counts.
    """
    n, y = checked(operator, tokens, latency_s)
    constant, knots, slopes, _, quality = _fit(n, y, np.empty((n.size, 0)), core)
    return DenseFit(constant_s=constant, knots_tokens=knots, slopes_s_per_token=slopes, quality=quality)


def fit_experts(
    operator: str, tokens: Sequence[float], touched: Sequence[float], latency_s: Sequence[float]
) -> ExpertsFit:
    """Fit the experts of a mixture: a dense curve in tokens, plus seconds for each expert that is touched.

    `touched` are the distinct experts of each call, measured or expected. Raises ValueError as `fit_dense` does,
    and where `touched` is not above 0.
    """
    n, y = checked(operator, tokens, latency_s)
    order = np.lexsort((np.asarray(latency_s, dtype=np.float64), np.asarray(tokens, dtype=np.float64)))
    experts = np.asarray(touched, dtype=np.float64)[order]
    if not (np.isfinite(experts) & (experts > 0.0)).all():
        raise ValueError(f"{operator}: experts touched must be above 0 in every row; found {experts.min()}.")
    constant, knots, slopes, (expert,), quality = _fit(n, y, experts[:, None], CORE_TOKENS)
    curve = DenseFit(constant_s=constant, knots_tokens=knots, slopes_s_per_token=slopes, quality=quality)
    return ExpertsFit(curve=curve, expert_s=expert)


def _fit(
    n: Floats, y: Floats, extra: Floats, core: int
) -> tuple[float, Knots, tuple[float, ...], tuple[float, ...], FitQuality]:
    """Constant, knots, slopes, the extra columns' coefficients, and the quality of the fit to what is kept."""
    inner = np.unique(n)[MIN_POINTS_PER_PIECE - 1 : -MIN_POINTS_PER_PIECE : MIN_POINTS_PER_PIECE]
    trial = _pieces_basis(n, tuple(int(knot) for knot in _spread(inner, TRIAL_KNOTS)), extra)
    keep = kept(trial, y, n, enough=lambda mask: np.unique(n[mask]).size >= MIN_POINTS)
    all_n, all_y = n, y
    n, y, extra = n[keep], y[keep], extra[keep]
    knots = _chosen_knots(n, y, extra)
    predicted = np.empty_like(y)
    for train, test in folds(n.size):
        fold_knots = _chosen_knots(n[train], y[train], extra[train])
        coefficients = _fit_pieces(_pieces_basis(n[train], fold_knots, extra[train]), n[train], y[train], fold_knots)
        predicted[test] = _pieces_basis(n[test], fold_knots, extra[test]) @ coefficients
    coefficients = _fit_pieces(_pieces_basis(n, knots, extra), n, y, knots)
    constant, *rest = coefficients.tolist()
    slopes, others = tuple(rest[: len(knots) + 1]), tuple(rest[len(knots) + 1 :])
    expected = _pieces_basis(all_n, knots, np.zeros((all_n.size, extra.shape[1]))) @ coefficients
    out = tuple(
        LeftOut(tokens=int(tokens), latency_s=float(latency), expected_s=float(should))
        for tokens, latency, should in zip(all_n[~keep], all_y[~keep], expected[~keep], strict=True)
    )
    quality = assess(y, predicted, core=n >= core, measured=(int(n.min()), int(n.max())), left_out=out)
    return constant, knots, slopes, others, quality


def checked(operator: str, tokens: Sequence[float], latency_s: Sequence[float]) -> tuple[Floats, Floats]:
    """The points as arrays, sorted by tokens, then latency; ValueError for what cannot be fitted."""
    if len(tokens) != len(latency_s):
        raise ValueError(f"{operator}: {len(tokens)} token counts but {len(latency_s)} latencies; give pairs.")
    for row, (n, y) in enumerate(zip(tokens, latency_s, strict=True)):
        if not (math.isfinite(n) and n > 0 and n == int(n)):
            raise ValueError(f"{operator}: point {row} has {n} tokens; give positive whole numbers.")
        if not (math.isfinite(y) and y > 0):
            raise ValueError(
                f"{operator}: point {row} ({n} tokens) has a latency of {y} s; "
                "latencies must be finite and > 0. Leave the point out or measure it again."
            )
    distinct = len(set(tokens))
    if distinct < MIN_POINTS:
        raise ValueError(
            f"{operator}: {distinct} distinct token counts {sorted(set(tokens))}; a fit needs {MIN_POINTS}. "
            "Measure more points."
        )
    n_array, y_array = np.asarray(tokens, dtype=np.float64), np.asarray(latency_s, dtype=np.float64)
    by_tokens = np.lexsort((y_array, n_array))
    return n_array[by_tokens], y_array[by_tokens]


def _pieces_basis(n: Floats, knots: Knots, extra: Floats) -> Floats:
    """Columns: 1, how many of the n tokens lie in each piece, then the extra ones."""
    edges = (0.0, *knots, math.inf)
    inside = [np.clip(n, start, end) - start for start, end in pairwise(edges)]
    return np.column_stack([np.ones_like(n), *inside, extra])


def _fit_pieces(basis: Floats, n: Floats, y: Floats, knots: Knots) -> Floats:
    """Constant, slopes and extra coefficients; each slope is the floor plus a non-negative rest, hence > 0."""
    floor = SLOPE_FLOOR * float(y.max()) / float(n.max())
    coefficients = relative_nnls(basis, y - floor * n, y)
    coefficients[1 : len(knots) + 2] += floor
    return coefficients


def _spread(values: Floats, count: int) -> Floats:
    """At most `count` of the rising values, evenly spaced in their logarithm."""
    if values.size <= count:
        return values
    wanted = np.geomspace(values[0], values[-1], count)
    return np.asarray(np.unique(values[[int(np.abs(values - value).argmin()) for value in wanted]]), dtype=np.float64)


def _chosen_knots(n: Floats, y: Floats, extra: Floats) -> Knots:
    """Knots of least held-out MAPE; ties go to the smaller knots, and to fewer pieces within the margin."""
    inner = np.unique(n)[MIN_POINTS_PER_PIECE - 1 : -MIN_POINTS_PER_PIECE]
    candidates = [int(value) for value in _spread(inner, MAX_KNOT_CANDIDATES)]
    chosen: Knots = ()
    chosen_mape = _heldout_mape(n, y, extra, chosen)
    for pieces in range(2, MAX_PIECES + 1):
        options = [knots for knots in combinations(candidates, pieces - 1) if _are_apart(n, knots)]
        if not options or chosen_mape < NEGLIGIBLE_MAPE:
            break
        mape, knots = min((_heldout_mape(n, y, extra, knots), knots) for knots in options)
        if mape < (1.0 - PIECE_MARGIN) * chosen_mape:
            chosen, chosen_mape = knots, mape
    return chosen


def _are_apart(n: Floats, knots: Knots) -> bool:
    """Whether every piece holds enough distinct token counts."""
    inside = np.searchsorted(np.asarray(knots, dtype=np.float64), np.unique(n))
    return int(np.bincount(inside, minlength=len(knots) + 1).min()) >= MIN_POINTS_PER_PIECE


def _heldout_mape(n: Floats, y: Floats, extra: Floats, knots: Knots) -> float:
    basis = _pieces_basis(n, knots, extra)
    errors = np.empty_like(y)
    for train, test in folds(n.size):
        predicted = basis[test] @ _fit_pieces(basis[train], n[train], y[train], knots)
        errors[test] = np.abs(predicted - y[test]) / y[test]
    return float(errors.mean())
