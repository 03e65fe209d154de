"""Fits latency curves to measured operator latencies; reads and writes no file, knows no simulator.

Every fit is a non-negative least squares on relative errors (each point weighted by 1 / its latency), so a
microsecond operator at one token counts as much as a millisecond operator at eight thousand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

Floats = npt.NDArray[np.float64]
Knots = tuple[int, ...]

FOLDS = 5
MAX_PIECES = 3
MIN_POINTS = 8  # distinct token counts a fit needs
MIN_POINTS_PER_PIECE = 3
MAX_KNOT_CANDIDATES = 20
PIECE_MARGIN = 0.10  # a further piece must lower the held-out MAPE by this share of it
NEGLIGIBLE_MAPE = 1e-6  # below it, differences are rounding and buy no piece
SLOPE_FLOOR = 1e-3  # smallest slope of a piece, as a share of max(latency) / max(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitQuality:
    """How well a fit predicts points it has not seen, by 5-fold cross-validation.

    The pieces and knots are chosen again without the held-out fold, so they have not seen its points either.
    `heldout_mape` and `heldout_max_error` are fractions of the measured latency; `r2` is the coefficient of
    determination of the held-out predictions; `measured_tokens` is the range (first, last) of the points.
    """

    points: int
    heldout_mape: float
    heldout_max_error: float
    r2: float
    measured_tokens: tuple[int, int]


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
class AttentionFit:
    """Attention of one layer: seconds per unit of `1`, `c`, `c*c`, `c*p`, `p` (c new, p cached tokens).

    `assumed` names the coefficients that were not measured.
    """

    coefficients: dict[str, float]
    assumed: tuple[str, ...]
    quality: FitQuality

    def seconds(self, new_tokens: float, cached_tokens: float = 0.0) -> float:
        """Latency of one call that adds `new_tokens` to a context of `cached_tokens`."""
        c, p = new_tokens, cached_tokens
        features = {"1": 1.0, "c": c, "c*c": c * c, "c*p": c * p, "p": p}
        return sum(self.coefficients[name] * value for name, value in features.items())


def fit_dense(operator: str, tokens: Sequence[float], latency_s: Sequence[float]) -> DenseFit:
    """Fit a dense operator (GEMM, norm, rope, activation, add, embedding) with one to three linear pieces.

    `tokens` and `latency_s` hold one measured call each, in any order; token counts may repeat. The number of
    pieces and the knots (among the measured token counts, at least 3 of them to a piece) have the least
    held-out error; a further piece is taken only if it lowers the held-out MAPE by a tenth. Raises
    ValueError, naming operator and point, for a latency that is not finite and positive, for a token count
    that is not a positive whole number, and for fewer than 8 distinct token counts.
    """
    n, y = _checked(operator, tokens, latency_s)
    knots = _chosen_knots(n, y)
    predicted = np.empty_like(y)
    for train, test in _folds(n.size):
        fold_knots = _chosen_knots(n[train], y[train])
        coefficients = _fit_pieces(_pieces_basis(n[train], fold_knots), n[train], y[train])
        predicted[test] = _pieces_basis(n[test], fold_knots) @ coefficients
    constant, *slopes = _fit_pieces(_pieces_basis(n, knots), n, y).tolist()
    return DenseFit(
        constant_s=constant,
        knots_tokens=knots,
        slopes_s_per_token=tuple(slopes),
        quality=_quality(n, y, predicted),
    )


def fit_attention_without_prefix(operator: str, tokens: Sequence[float], latency_s: Sequence[float]) -> AttentionFit:
    """Fit attention measured on whole prompts only (no cached tokens): `1`, `c` and `c*c`.

    The prefix terms are assumed: `c*p` = 2 x `c*c` and `p` = 0, with which the chunks of a prompt sum to its
    whole attention, but for one constant a call. Raises ValueError as `fit_dense` does, and where no term
    grows with the tokens.
    """
    n, y = _checked(operator, tokens, latency_s)
    basis = np.column_stack([np.ones_like(n), n, n * n])
    predicted = np.empty_like(y)
    for train, test in _folds(n.size):
        predicted[test] = basis[test] @ _relative_nnls(basis[train], y[train], y[train])
    constant, linear, quadratic = _relative_nnls(basis, y, y).tolist()
    if linear + quadratic <= 0.0:
        raise ValueError(f"{operator}: the latencies do not grow with the tokens; measure longer prompts.")
    coefficients = {"1": constant, "c": linear, "c*c": quadratic, "c*p": 2.0 * quadratic, "p": 0.0}
    return AttentionFit(coefficients=coefficients, assumed=("c*p", "p"), quality=_quality(n, y, predicted))


def _checked(operator: str, tokens: Sequence[float], latency_s: Sequence[float]) -> tuple[Floats, Floats]:
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


def _folds(points: int) -> Iterator[tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]]:
    """(train, test) masks: every fifth point in order of tokens, so that no draw is involved."""
    fold = np.arange(points) % FOLDS
    for k in range(FOLDS):
        yield fold != k, fold == k


def _relative_nnls(basis: Floats, target: Floats, y: Floats) -> Floats:
    """Coefficients >= 0 that minimise the sum of ((basis @ coefficients - target) / y) squared."""
    weighted = basis / y[:, None]
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0.0] = 1.0
    solution, _ = nnls(weighted / scale, target / y)
    return np.asarray(solution / scale, dtype=np.float64)


def _pieces_basis(n: Floats, knots: Knots) -> Floats:
    """Columns: 1, then how many of the n tokens lie in each piece; shape (points, pieces + 1)."""
    edges = (0.0, *knots, math.inf)
    inside = [np.clip(n, start, end) - start for start, end in pairwise(edges)]
    return np.column_stack([np.ones_like(n), *inside])


def _fit_pieces(basis: Floats, n: Floats, y: Floats) -> Floats:
    """Constant and slopes; each slope is the floor plus a non-negative rest, hence > 0."""
    floor = SLOPE_FLOOR * float(y.max()) / float(n.max())
    coefficients = _relative_nnls(basis, y - floor * n, y)
    coefficients[1:] += floor
    return coefficients


def _knot_candidates(n: Floats) -> list[int]:
    """Measured token counts that may be a knot; where there are many, evenly spaced in their logarithm."""
    inner = np.unique(n)[MIN_POINTS_PER_PIECE - 1 : -MIN_POINTS_PER_PIECE]
    if inner.size > MAX_KNOT_CANDIDATES:
        wanted = np.geomspace(inner[0], inner[-1], MAX_KNOT_CANDIDATES)
        inner = np.unique(inner[[int(np.abs(inner - value).argmin()) for value in wanted]])
    return [int(value) for value in inner]


def _chosen_knots(n: Floats, y: Floats) -> Knots:
    """Knots of least held-out MAPE; ties go to the smaller knots, and to fewer pieces within the margin."""
    candidates = _knot_candidates(n)
    chosen: Knots = ()
    chosen_mape = _heldout_mape(n, y, chosen)
    for pieces in range(2, MAX_PIECES + 1):
        options = [knots for knots in combinations(candidates, pieces - 1) if _are_apart(n, knots)]
        if not options or chosen_mape < NEGLIGIBLE_MAPE:
            break
        mape, knots = min((_heldout_mape(n, y, knots), knots) for knots in options)
        if mape < (1.0 - PIECE_MARGIN) * chosen_mape:
            chosen, chosen_mape = knots, mape
    return chosen


def _are_apart(n: Floats, knots: Knots) -> bool:
    """Whether every piece holds enough distinct token counts."""
    inside = np.searchsorted(np.asarray(knots, dtype=np.float64), np.unique(n))
    return int(np.bincount(inside, minlength=len(knots) + 1).min()) >= MIN_POINTS_PER_PIECE


def _heldout_mape(n: Floats, y: Floats, knots: Knots) -> float:
    basis = _pieces_basis(n, knots)
    errors = np.empty_like(y)
    for train, test in _folds(n.size):
        predicted = basis[test] @ _fit_pieces(basis[train], n[train], y[train])
        errors[test] = np.abs(predicted - y[test]) / y[test]
    return float(errors.mean())


def _quality(n: Floats, y: Floats, predicted: Floats) -> FitQuality:
    relative = np.abs(predicted - y) / y
    variation = float(((y - y.mean()) ** 2).sum())
    return FitQuality(
        points=int(n.size),
        heldout_mape=float(relative.mean()),
        heldout_max_error=float(relative.max()),
        r2=1.0 - float(((predicted - y) ** 2).sum()) / variation if variation > 0.0 else 0.0,
        measured_tokens=(int(n.min()), int(n.max())),
    )
