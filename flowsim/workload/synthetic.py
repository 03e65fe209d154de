"""Synthetic workloads: arrivals, classes and lengths drawn from separate random streams.

The streams are the children of the run's stream 0, `SeedSequence(seed).spawn(...)[0]`, so that a change of rate,
shares or lengths leaves the other draws as they are, and no other part of a run shares them. With one seed the rate
scales the gaps and nothing else, and a longer workload begins with the shorter one. This module must not know trace
formats or SLOs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowsim.names import unknown
from flowsim.workload.arrivals import arrival_times
from flowsim.workload.define import workload
from flowsim.workload.lengths import LengthClass, load_quantiles
from flowsim.workload.rows import MAX_TOKENS, Rows

__all__ = ["lognormal", "mixed", "quantiles", "streams", "uniform"]

DEFAULT_REQUESTS = 5000
MAX_REQUESTS = 100_000_000

Lengths = NDArray[np.int64]


@workload
def quantiles(
    *,
    table: str,
    rate_rps: float = 6.0,
    num_requests: int | None = None,
    duration_s: float | None = None,
    arrivals: Any = "poisson",
    shares: Mapping[str, float] | None = None,
    seed: int = 0,
) -> Rows:
    """Classes and lengths from a quantile table, with any arrival process.

    Args:
        table: a shipped table's name, or the path of a YAML file of the same form.
        rate_rps: mean requests per second.
        num_requests: how many; None for 5000, or for as many as `duration_s` takes.
        duration_s: only what arrives within so many seconds of the first.
        arrivals: `poisson`, `deterministic`, or a process with parameters, `{gamma: {cv: 3}}`
            (`flowsim.workload.arrivals`).
        shares: class -> share, summing to 1, in place of the table's; a class left out has none.
        seed: of the draws.

    Raises:
        ValueError: an argument out of its range, or an unknown table, class or process.
    """
    return _from_table(table, rate_rps, num_requests, duration_s, arrivals, shares, seed)


@workload
def mixed(
    *,
    rate_rps: float = 6.0,
    num_requests: int | None = None,
    duration_s: float | None = None,
    arrivals: Any = "poisson",
    shares: Mapping[str, float] | None = None,
    seed: int = 0,
) -> Rows:
    """`quantiles` with the table `qwentrace`: the four task classes that FlowPrefill was measured with (text, image,
    search, file), their shares and prompt lengths. Output lengths are 1, as the table has none.
    """
    return _from_table("qwentrace", rate_rps, num_requests, duration_s, arrivals, shares, seed)


def _from_table(
    table: str,
    rate_rps: float,
    num_requests: int | None,
    duration_s: float | None,
    arrivals: Any,
    shares: Mapping[str, float] | None,
    seed: int,
) -> Rows:
    classes = load_quantiles(table)
    share = _shares(classes, shares)
    arrival_rng, class_rng, length_rng, output_rng = streams(seed)
    arrival_s = _arrivals(arrivals, arrival_rng, rate_rps, num_requests, duration_s)
    row_class = _row_classes(share, class_rng.random(len(arrival_s)))
    names = list(classes)
    return Rows.of(
        arrival_s,
        _lengths(classes, row_class, length_rng.random(len(arrival_s)), "prompt_tokens"),
        output_tokens=_lengths(classes, row_class, output_rng.random(len(arrival_s)), "output_tokens"),
        slo_class=[names[index] for index in row_class.tolist()],
    )


@workload
def uniform(
    *,
    rate_rps: float = 6.0,
    num_requests: int | None = None,
    duration_s: float | None = None,
    min_tokens: int = 100,
    max_tokens: int = 4000,
    output_tokens: int = 1,
    arrivals: Any = "poisson",
    seed: int = 0,
) -> Rows:
    """One class, `default`: prompts uniform on `min_tokens`..`max_tokens`, ends included; all outputs alike.

    Raises:
        ValueError: an argument out of its range.
    """
    _count("min_tokens", min_tokens)
    _count("max_tokens", max_tokens)
    if max_tokens < min_tokens:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least min_tokens, {min_tokens}")
    arrival_rng, _, length_rng, _ = streams(seed)
    arrival_s = _arrivals(arrivals, arrival_rng, rate_rps, num_requests, duration_s)
    prompt_tokens = length_rng.integers(min_tokens, max_tokens, len(arrival_s), endpoint=True)
    return Rows.of(arrival_s, prompt_tokens, output_tokens=_alike(output_tokens, len(arrival_s)))


@workload
def lognormal(
    *,
    rate_rps: float = 6.0,
    num_requests: int | None = None,
    duration_s: float | None = None,
    mean_tokens: float = 1600.0,
    cv: float = 1.0,
    min_tokens: int = 1,
    max_tokens: int = 131_072,
    output_tokens: int = 1,
    arrivals: Any = "poisson",
    seed: int = 0,
) -> Rows:
    """One class, `default`: lognormal prompts of a mean and a coefficient of variation, cut to a range.

    Raises:
        ValueError: an argument out of its range.
    """
    for name, value in (("mean_tokens", mean_tokens), ("cv", cv)):
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name} is {value}; it must be a finite number > 0")
    if not 1 <= min_tokens <= max_tokens <= MAX_TOKENS:
        raise ValueError(f"min_tokens is {min_tokens} and max_tokens {max_tokens}; 1 <= min <= max <= {MAX_TOKENS}")
    arrival_rng, _, length_rng, _ = streams(seed)
    arrival_s = _arrivals(arrivals, arrival_rng, rate_rps, num_requests, duration_s)
    variance = math.log(1.0 + cv * cv)
    drawn = length_rng.lognormal(math.log(mean_tokens) - variance / 2.0, math.sqrt(variance), len(arrival_s))
    prompt_tokens = np.clip(np.rint(drawn), min_tokens, max_tokens).astype(np.int64)
    return Rows.of(arrival_s, prompt_tokens, output_tokens=_alike(output_tokens, len(arrival_s)))


def streams(seed: int) -> list[np.random.Generator]:
    """The random streams of a workload: arrivals, classes, prompt lengths, output lengths.

    Raises:
        ValueError: a seed that is not a whole number of at least 0.
    """
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed is {seed!r}; it must be an integer of at least 0")
    children = np.random.SeedSequence(int(seed), spawn_key=(0,)).spawn(4)
    return [np.random.default_rng(child) for child in children]


def _arrivals(
    process: Any, rng: np.random.Generator, rate_rps: float, num_requests: int | None, duration_s: float | None
) -> NDArray[np.float64]:
    """Arrivals up to a number, a duration, or both; 5000 where neither is given."""
    if duration_s is None:
        count = DEFAULT_REQUESTS if num_requests is None else _count("num_requests", num_requests)
        return arrival_times(process, rng, rate_rps, count)
    if not 0.0 < duration_s < math.inf:
        raise ValueError(f"duration_s is {duration_s}; it must be a finite number > 0")
    state = rng.bit_generator.state
    count = 64 if num_requests is None else _count("num_requests", num_requests)
    while True:
        rng.bit_generator.state = state  # a longer draw begins with the shorter one
        arrival_s = arrival_times(process, rng, rate_rps, count)
        if num_requests is not None or arrival_s[-1] >= duration_s:
            return arrival_s[arrival_s < duration_s]
        count *= 2
        if count > MAX_REQUESTS:
            raise ValueError(f"duration_s={duration_s:g} at rate_rps={rate_rps:g} is over {MAX_REQUESTS} requests")


def _alike(output_tokens: int, rows: int) -> Lengths:
    return np.full(rows, _count("output_tokens", output_tokens), dtype=np.int64)


def _row_classes(shares: Mapping[str, float], level: NDArray[np.float64]) -> Lengths:
    """The class of each row, as its place in `shares`; a class without a share is never chosen."""
    upper = np.cumsum(list(shares.values()))
    return np.searchsorted(upper / upper[-1], level, side="right").astype(np.int64)


def _lengths(classes: Mapping[str, LengthClass], row_class: Lengths, level: NDArray[np.float64], which: str) -> Lengths:
    """Prompt or output tokens of each row by its class's quantiles; 1 where the class has none."""
    tokens = np.ones(len(level), dtype=np.int64)
    for index, entry in enumerate(classes.values()):
        table, chosen = getattr(entry, which), row_class == index
        if table is not None:
            tokens[chosen] = np.rint(table.quantile(level[chosen]))
    return tokens


def _shares(classes: Mapping[str, LengthClass], shares: Mapping[str, float] | None) -> dict[str, float]:
    if shares is None:
        return {name: entry.share for name, entry in classes.items()}
    for name, share in shares.items():
        if name not in classes:
            raise ValueError(unknown("class", name, classes, where="in shares"))
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"the share of class {name} is {share}; it must be within 0..1")
    total = sum(shares.values())
    if abs(total - 1.0) > 1e-6:
        raise ValueError(f"shares sum to {total:.6g}; they must sum to 1")
    return {name: float(shares.get(name, 0.0)) for name in classes}


def _count(name: str, value: int) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
    return int(value)
