"""What every fit shares: non-negative relative least squares, held-out folds, outliers, and how good a fit is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

__all__ = ["FitQuality", "Floats", "LeftOut", "Mask", "assess", "folds", "kept", "relative_nnls"]

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

FOLDS = 5
OFF_BY = math.log(1.5)  # a point off the robust curve by less than this factor is never left out
SIGMAS = 6.0  # nor one that is within this many robust standard deviations of it
NEIGHBOURS = 2  # on each side; a point off by as much as one of them shows the curve's error, not its own
MAX_LEFT_OUT, MAX_LEFT_OUT_POINTS = 0.01, 2  # where more are far off, the curve is to blame: the larger of the two
ROUNDS = 20
SPREAD_FLOOR = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A measured call that the fit does not use: its tokens, its latency, and the latency of the fitted curve."""

    tokens: int
    latency_s: float
    expected_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitQuality:
    """How well a fit predicts points it has not seen, by 5-fold cross-validation.

    The pieces and knots are chosen again without the held-out fold, so they have not seen its points either.
    `heldout_mape` and `heldout_max_error` are fractions of the measured latency, over all points that are kept;
    `heldout_mape_core` is over those that matter most (NaN where there are none); `r2` is the coefficient of
    determination of the held-out predictions; `measured_tokens` is the range (first, last) of the points.
    """

    points: int
    heldout_mape: float
    heldout_mape_core: float
    heldout_max_error: float
    r2: float
    measured_tokens: tuple[int, int]
    left_out: tuple[LeftOut, ...] = ()


def folds(points: int) -> Iterator[tuple[Mask, Mask]]:
    """(train, test) masks: every fifth point in order of tokens, so that no draw is involved."""
    fold = np.arange(points) % FOLDS
    for k in range(FOLDS):
        yield fold != k, fold == k


def relative_nnls(basis: Floats, target: Floats, y: Floats) -> Floats:
    """Coefficients >= 0 that minimise the sum of ((basis @ coefficients - target) / y) squared."""
    weighted = basis / y[:, None]
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0.0] = 1.0
    weighted, wanted = weighted / scale, target / y
    if weighted.shape[0] > 4 * weighted.shape[1]:  # the same minimum, on far fewer rows
        q, weighted = np.linalg.qr(weighted)
        wanted = q.T @ wanted
    solution, _ = nnls(weighted, wanted)
    return np.asarray(solution / scale, dtype=np.float64)


def kept(basis: Floats, y: Floats, axis: Floats | None = None, *, enough: Callable[[Mask], bool]) -> Mask:
    """Which points to fit: all but the lone ones far off a curve that is fitted robustly (Cauchy weights, log errors).

    The points are in order. Lone: no neighbour is as far off; and where they lie on one `axis` (tokens, rising),
    few lines through two neighbours lead to the point. All are kept where `enough` says that the rest would not
    do, or where so many are far off that the curve is to blame.
    """
    around = [float(np.median(y[[row, *_neighbours(row, y.size)]])) for row in range(y.size)]
    scale = np.maximum(y, around)  # a point that is far too low must not weigh more for it
    weights = np.ones_like(y)
    errors, spread = np.zeros_like(y), SPREAD_FLOOR
    for _ in range(ROUNDS):
        fitted = basis @ relative_nnls(basis * weights[:, None], y * weights, scale)
        errors = np.log(np.maximum(fitted, 1e-3 * y) / y)
        spread = max(SPREAD_FLOOR, 1.4826 * float(np.median(np.abs(errors))))
        weights = 1.0 / np.sqrt(1.0 + (errors / spread) ** 2)
    limit = max(OFF_BY, SIGMAS * spread)
    mask = np.abs(errors) <= limit
    for row in np.flatnonzero(~mask):
        near = _neighbours(int(row), y.size)
        shared = bool((np.abs(errors[near] - errors[row]) <= limit).any())
        mask[row] = shared or (axis is not None and _is_led_to(int(row), near, axis, y, limit))
    too_many = np.count_nonzero(~mask) > max(MAX_LEFT_OUT_POINTS, MAX_LEFT_OUT * y.size)
    return np.ones_like(mask) if too_many or not enough(mask) else mask


def _neighbours(row: int, count: int) -> list[int]:
    """The nearest other rows, as many at the ends as elsewhere."""
    first = min(max(0, row - NEIGHBOURS), max(0, count - 2 * NEIGHBOURS - 1))
    return [place for place in range(first, min(count, first + 2 * NEIGHBOURS + 1)) if place != row]


def _is_led_to(row: int, near: list[int], axis: Floats, y: Floats, limit: float) -> bool:
    """Whether half of the power laws through two neighbours pass the point within the limit."""
    x, logs = np.log(axis), np.log(y)
    lines = [(a, b) for a, b in combinations(near, 2) if x[a] != x[b]]
    slopes = [(logs[b] - logs[a]) / (x[b] - x[a]) for a, b in lines]
    hits = [
        abs(logs[a] + slope * (x[row] - x[a]) - logs[row]) <= limit for (a, _), slope in zip(lines, slopes, strict=True)
    ]
    return 2 * sum(hits) >= len(hits)


def assess(
    y: Floats, predicted: Floats, *, core: Mask, measured: tuple[int, int], left_out: tuple[LeftOut, ...] = ()
) -> FitQuality:
    """The quality of held-out predictions of the latencies `y`; `core` marks the points that matter most."""
    relative = np.abs(predicted - y) / y
    variation = float(((y - y.mean()) ** 2).sum())
    return FitQuality(
        points=int(y.size),
        heldout_mape=float(relative.mean()),
        heldout_mape_core=float(relative[core].mean()) if core.any() else math.nan,
        heldout_max_error=float(relative.max()),
        r2=1.0 - float(((predicted - y) ** 2).sum()) / variation if variation > 0.0 else 0.0,
        measured_tokens=measured,
        left_out=left_out,
    )
