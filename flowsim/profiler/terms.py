"""Fits attention: sums of named terms with non-negative coefficients, for prefill, decode and mixed batches.

Reads and writes no file, knows no simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flowsim.profiler.fit import CORE_TOKENS, MIN_POINTS, PIECE_MARGIN, checked
from flowsim.profiler.robust import FitQuality, Floats, LeftOut, Mask, assess, folds, kept, relative_nnls

__all__ = ["TermsFit", "fit_attention", "fit_attention_without_prefix", "fit_decode_attention", "fit_mixed_attention"]

MAX_FLOOR_TOKENS = 1024  # largest count of new tokens below which fewer may be no cheaper
CORE_DECODES, CORE_KV_TOKENS = 16, (256, 4096)
SERVED_DECODES, SERVED_KV_TOKENS, SERVED_CACHED_TOKENS = 8, (128, 4096), 4096  # what mixed batches are fitted on
ENOUGH_SERVED = 100  # points of those; with fewer, on all


@dataclass(frozen=True, slots=True, kw_only=True)
class TermsFit:
    """A latency as a sum of coefficients times terms; seconds per unit of each term.

    `assumed` names the coefficients that were not measured.
    """

    coefficients: dict[str, float]
    quality: FitQuality
    assumed: tuple[str, ...] = ()
    floor_tokens: int = 0

    def seconds(self, new_tokens: float, cached_tokens: float = 0.0) -> float:
        """Latency of one prefill call that adds `new_tokens` to a context of `cached_tokens`."""
        c, p, wide = new_tokens, cached_tokens, max(new_tokens, self.floor_tokens)
        return self.of({"1": 1.0, "c": c, "c*c": c * c, "c*p": wide * p, "p": p, "f": wide})

    def of(self, terms: Mapping[str, float]) -> float:
        """Latency of a call with these values of the terms."""
        return sum(value * terms[name] for name, value in self.coefficients.items())


def fit_attention(
    operator: str, new_tokens: Sequence[float], cached_tokens: Sequence[float], latency_s: Sequence[float]
) -> TermsFit:
    """Fit prefill attention of one layer in `1, c, c*c, c*p, p` (c new tokens on p cached ones), and its floor.

    Kernels work on tiles of new tokens, so below some count fewer are no cheaper: with a floor f, chosen among the
    measured c by held-out error, `c*p` counts max(c, f) new tokens and a term `f` counts max(c, f) itself. `c*p`
    is at least 2 x `c*c`, so the chunks of a prompt never cost less than the whole. Without a call with cached
    tokens the prefix terms are assumed, see `fit_attention_without_prefix`. Raises ValueError as `fit_dense` does,
    and where no term grows with the tokens.
    """
    if not any(cached_tokens):
        return fit_attention_without_prefix(operator, new_tokens, latency_s)
    checked(operator, new_tokens, latency_s)
    c, p = np.asarray(new_tokens, dtype=np.float64), np.asarray(cached_tokens, dtype=np.float64)
    y = np.asarray(latency_s, dtype=np.float64)
    order = np.lexsort((y, p, c))
    c, p, y = c[order], p[order], y[order]
    keep = kept(_prefix_basis(c, p, 0), y, enough=lambda mask: np.unique(c[mask]).size >= MIN_POINTS)
    left, (c, p, y) = (c[~keep], p[~keep], y[~keep]), (c[keep], p[keep], y[keep])
    predicted = np.empty_like(y)
    for train, test in folds(y.size):
        floor = _chosen_floor(c[train], p[train], y[train])
        values = relative_nnls(_prefix_basis(c[train], p[train], floor), y[train], y[train])
        predicted[test] = _prefix_basis(c[test], p[test], floor) @ values
    floor = _chosen_floor(c, p, y)
    values = relative_nnls(_prefix_basis(c, p, floor), y, y)
    out = tuple(
        LeftOut(tokens=int(new + cached), latency_s=float(latency), expected_s=float(should))
        for new, cached, latency, should in zip(*left, _prefix_basis(left[0], left[1], floor) @ values, strict=True)
    )
    measured = (int(c.min()), int((c + p).max()))
    quality = assess(y, predicted, core=c >= CORE_TOKENS, measured=measured, left_out=out)
    one, linear, square, extra, prefix, *wide = values.tolist()
    _must_grow(operator, linear + square)
    named = {"1": one, "c": linear, "c*c": square, "c*p": 2.0 * square + extra, "p": prefix}
    if wide:
        named["f"] = wide[0]
    return TermsFit(coefficients=named, quality=quality, floor_tokens=floor)


def _prefix_basis(c: Floats, p: Floats, floor: int) -> Floats:
    wide = np.maximum(c, float(floor))
    columns = [np.ones_like(c), c, c * c + 2.0 * wide * p, wide * p, p]
    return np.column_stack([*columns, wide] if floor else columns)


def _chosen_floor(c: Floats, p: Floats, y: Floats) -> int:
    """The floor of least held-out error, among the measured counts of new tokens; 0 within the margin of it."""
    candidates = [0, *(int(value) for value in np.unique(c) if value <= MAX_FLOOR_TOKENS)]
    errors = {}
    for floor in candidates:
        basis, off = _prefix_basis(c, p, floor), np.empty_like(y)
        for train, test in folds(y.size):
            off[test] = np.abs(basis[test] @ relative_nnls(basis[train], y[train], y[train]) / y[test] - 1.0)
        errors[floor] = float(off.mean())
    best = min(candidates, key=lambda floor: (errors[floor], floor))
    return best if errors[best] < (1.0 - PIECE_MARGIN) * errors[0] else 0


def fit_attention_without_prefix(operator: str, tokens: Sequence[float], latency_s: Sequence[float]) -> TermsFit:
    """Fit attention measured on whole prompts only (no cached tokens): `1`, `c` and `c*c`.

    The prefix terms are assumed: `c*p` = 2 x `c*c` and `p` = 0, with which the chunks of a prompt sum to its
    whole attention, but for one constant a call. Raises ValueError as `fit_dense` does, and where no term
    grows with the tokens.
    """
    n, y = checked(operator, tokens, latency_s)
    basis = np.column_stack([np.ones_like(n), n, n * n])
    values, quality = _fit(basis, y, n, core=n >= CORE_TOKENS, measured=(int(n.min()), int(n.max())))
    one, linear, square = values
    _must_grow(operator, linear + square)
    named = {"1": one, "c": linear, "c*c": square, "c*p": 2.0 * square, "p": 0.0}
    return TermsFit(coefficients=named, quality=quality, assumed=("c*p", "p"))


def fit_decode_attention(
    operator: str, decodes: Sequence[float], kv_tokens: Sequence[float], latency_s: Sequence[float]
) -> TermsFit:
    """Fit attention of a decode step in `1, n, sum_kv, mean_kv`: n decodes with `kv_tokens` of context each.

    The quality's core is 16 decodes or more with 256 to 4096 tokens; its range is that of the KV tokens of one
    decode. Raises ValueError as `fit_dense` does.
    """
    checked(operator, kv_tokens, latency_s)
    n, kv, y = (np.asarray(values, dtype=np.float64) for values in (decodes, kv_tokens, latency_s))
    order = np.lexsort((y, n, kv))
    n, kv, y = n[order], kv[order], y[order]
    basis = np.column_stack([np.ones_like(n), n, n * kv, kv])
    values, quality = _fit(basis, y, kv, core=_core(n, kv), measured=(int(kv.min()), int(kv.max())))
    return TermsFit(coefficients=dict(zip(("1", "n", "sum_kv", "mean_kv"), values, strict=True)), quality=quality)


def fit_mixed_attention(
    operator: str,
    new_tokens: Sequence[float],
    cached_tokens: Sequence[float],
    decodes: Sequence[float],
    kv_tokens: Sequence[float],
    latency_s: Sequence[float],
) -> TermsFit:
    """Fit attention of a batch with a prefill and decodes in `1, q, work, kp, n, sum_kv, mean_kv, nq`.

    q new tokens on kp cached ones, work = q*kp + q*q/2, n decodes with `kv_tokens` each; nq = n*q, as each decode costs
    more in a batch with more new tokens. Fitted on 8 decodes or more of 128 to 4096 tokens, with at most 4096 cached
    ones, where there are enough points: a kernel's launch weighs most of the others, and relative errors there bend the
    fit by a tenth where engines run. Core as in `fit_decode_attention`. Raises ValueError as `fit_dense` does.
    """
    checked(operator, new_tokens, latency_s)
    given = (new_tokens, cached_tokens, decodes, kv_tokens, latency_s)
    q, kp, n, kv, y = (np.asarray(values, dtype=np.float64) for values in given)
    order = np.lexsort((y, kv, n, kp, q))
    low, high = SERVED_KV_TOKENS
    served = (n >= SERVED_DECODES) & (kv >= low) & (kv <= high) & (kp <= SERVED_CACHED_TOKENS)
    if served.sum() >= ENOUGH_SERVED:
        order = order[served[order]]
    q, kp, n, kv, y = (values[order] for values in (q, kp, n, kv, y))
    basis = np.column_stack([np.ones_like(q), q, q * kp + q * q / 2.0, kp, n, n * kv, kv, n * q])
    values, quality = _fit(basis, y, kv, core=_core(n, kv), measured=(int(kv.min()), int(kv.max())))
    names = ("1", "q", "work", "kp", "n", "sum_kv", "mean_kv", "nq")
    return TermsFit(coefficients=dict(zip(names, values, strict=True)), quality=quality)


def _core(decodes: Floats, kv_tokens: Floats) -> Mask:
    low, high = CORE_KV_TOKENS
    return np.asarray((decodes >= CORE_DECODES) & (kv_tokens >= low) & (kv_tokens <= high), dtype=np.bool_)


def _must_grow(operator: str, slope: float) -> None:
    if slope <= 0.0:
        raise ValueError(f"{operator}: the latencies do not grow with the tokens; measure longer prompts.")


def _fit(
    basis: Floats, y: Floats, tokens: Floats, *, core: Mask, measured: tuple[int, int]
) -> tuple[list[float], FitQuality]:
    """Coefficients of the columns and the quality of the fit to what is kept."""
    keep = kept(basis, y, enough=lambda mask: np.unique(tokens[mask]).size >= MIN_POINTS)
    coefficients = relative_nnls(basis[keep], y[keep], y[keep])
    expected = basis @ coefficients
    out = tuple(
        LeftOut(tokens=int(tokens[row]), latency_s=float(y[row]), expected_s=float(expected[row]))
        for row in np.flatnonzero(~keep)
    )
    basis, y, core = basis[keep], y[keep], core[keep]
    predicted = np.empty_like(y)
    for train, test in folds(y.size):
        predicted[test] = basis[test] @ relative_nnls(basis[train], y[train], y[train])
    return coefficients.tolist(), assess(y, predicted, core=core, measured=measured, left_out=out)
