"""Shaping: which part of a workload runs, how fast, and how often its rows are drawn again.

This module must not know where rows come from, or SLOs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flowsim.workload.rows import Rows

__all__ = ["shape"]

_log = logging.getLogger("flowsim")


def shape(
    rows: Rows,
    *,
    window_s: Sequence[float] | None = None,
    resample: int | None = None,
    num_requests: int | None = None,
    rate_scale: float | None = None,
    rate_rps: float | None = None,
    duration_s: float | None = None,
    max_context_tokens: int | None = None,
    seed: int = 0,
) -> Rows:
    """The rows shaped, in the order of the arguments; arrivals begin at 0 again.

    Args:
        rows: sorted by arrival.
        window_s: [a, b]: only what arrives from a until before b.
        resample: so many rows drawn with replacement, each with the gap that precedes it.
        num_requests: only the first so many.
        rate_scale: gaps are multiplied by 1 / rate_scale.
        rate_rps: gaps are multiplied so that (n - 1) / (last - first arrival) is this rate; not with `rate_scale`.
        duration_s: only what arrives within so many seconds of the first.
        max_context_tokens: longer prompts are cut to it, and outputs to what the prompt leaves (at least 1 token);
            how many is logged as a warning.
        seed: of the draws of `resample`.

    Raises:
        ValueError: a value out of its range, or nothing left.
    """
    if window_s is not None:
        rows = _window(rows, window_s)
    if resample is not None:
        rows = _resample(rows, _count("resample", resample), seed)
    if num_requests is not None:
        rows = rows.take(np.arange(min(_count("num_requests", num_requests), len(rows))))
    if rate_scale is not None or rate_rps is not None:
        rows = _scale(rows, rate_scale, rate_rps)
    if duration_s is not None:
        if not duration_s > 0.0:
            raise ValueError(f"duration_s is {duration_s}; it must be > 0")
        rows = rows.take(np.flatnonzero(rows.arrival_s < duration_s))
    return rows if max_context_tokens is None else _clip(rows, max_context_tokens)


def _window(rows: Rows, window_s: Sequence[float]) -> Rows:
    numbers = isinstance(window_s, Sequence) and all(isinstance(second, int | float) for second in window_s)
    if not numbers or len(window_s) != 2 or not 0.0 <= window_s[0] < window_s[1]:
        raise ValueError(f"window_s is {window_s!r:.60}; it must be two seconds [a, b] with 0 <= a < b")
    begin_s, end_s = window_s
    inside = np.flatnonzero((rows.arrival_s >= begin_s) & (rows.arrival_s < end_s))
    if not len(inside):
        last_s = rows.arrival_s[-1]
        raise ValueError(f"no request arrives within window_s {list(window_s)}; the last arrives at {last_s:g} s")
    return _rebased(rows.take(inside))


def _resample(rows: Rows, count: int, seed: int) -> Rows:
    if len(rows) < 2:
        raise ValueError("resample needs at least two requests to take gaps from")
    stream = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0, 9)))
    chosen = stream.integers(1, len(rows), count)
    gaps_s = np.diff(rows.arrival_s, prepend=0.0)[chosen]
    drawn = rows.take(chosen)
    return _rebased(replace(drawn, arrival_s=np.cumsum(gaps_s)))


def _scale(rows: Rows, rate_scale: float | None, rate_rps: float | None) -> Rows:
    if rate_scale is not None and rate_rps is not None:
        raise ValueError("give rate_scale or rate_rps, not both")
    if rate_rps is None:
        factor = _rate("rate_scale", rate_scale)
    else:
        span_s = float(rows.arrival_s[-1]) if len(rows) else 0.0
        if not span_s > 0.0:
            raise ValueError("rate_rps needs arrivals at two different times; all requests arrive at once")
        factor = _rate("rate_rps", rate_rps) * span_s / (len(rows) - 1)
    return replace(rows, arrival_s=rows.arrival_s / factor)


def _clip(rows: Rows, max_context_tokens: int) -> Rows:
    limit = _count("max_context_tokens", max_context_tokens)
    if limit < 2:
        raise ValueError(f"max_context_tokens is {limit}; it must be at least 2, a prompt and an output token")
    prompt_tokens = np.minimum(rows.prompt_tokens, limit - 1)
    output_tokens = np.minimum(rows.output_tokens, limit - prompt_tokens)
    prompts = int(np.count_nonzero(prompt_tokens < rows.prompt_tokens))
    outputs = int(np.count_nonzero(output_tokens < rows.output_tokens))
    if prompts or outputs:
        _log.warning("cut to a context of %d tokens: %d prompts, %d outputs", limit, prompts, outputs)
    return replace(rows, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


def _rebased(rows: Rows) -> Rows:
    arrival_s: NDArray[np.float64] = rows.arrival_s - rows.arrival_s[0]
    return replace(rows, arrival_s=arrival_s)


def _count(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
    return value


def _rate(name: str, value: float | None) -> float:
    if value is None or not 0.0 < value < math.inf:
        raise ValueError(f"{name} is {value}; it must be a finite number > 0")
    return value
