"""Synthetic workloads: arrivals, classes and lengths drawn from three separate random streams.

The streams are the children of the run's stream 0, `SeedSequence(seed).spawn(...)[0]`, so that a change of
rate, shares or lengths leaves the other draws as they are, and no other part of a run shares them. With one
seed the rate scales the gaps and nothing else, and a longer workload begins with the shorter one. This module
must not know trace formats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from flowsim.core import Request
from flowsim.workload.arrivals import poisson
from flowsim.workload.lengths import LengthClass, load_quantiles
from flowsim.workload.slo import TBT_SLO_S, ClassSLO, check_scale, class_slos

__all__ = ["mixed", "uniform"]


def mixed(
    *,
    rate_rps: float = 6.0,
    num_requests: int = 5000,
    slo_scale: float = 1.0,
    seed: int = 0,
    model: str = "llama3-8b",
    ttft_slo_s: Mapping[str, float] | None = None,
    shares: Mapping[str, float] | None = None,
    abandon_s: float = math.inf,
) -> list[Request]:
    """The four task classes of QwenTrace (text, image, search, file) with Poisson arrivals.

    Prompts follow the quantile table `qwentrace`, from the measured FlowPrefill run; without output lengths,
    which are 1. SLOs are the model's presets times `slo_scale`; `ttft_slo_s` (class -> seconds, `inf` none)
    replaces TTFT presets, and a model without presets needs it for every class. `shares` (class -> share,
    summing to 1 within 1e-6; a class left out has none) replaces the table's.
    A client gives up `abandon_s` after arrival.

    Raises:
        ValueError: an argument out of its range, or an unknown model or class, saying what is allowed.
    """
    _check_count("num_requests", num_requests)
    check_scale(slo_scale)
    classes = load_quantiles("qwentrace")
    slos = _slos(model, list(classes), ttft_slo_s)
    arrival_rng, class_rng, length_rng = _streams(seed)
    arrival_s = poisson(arrival_rng, rate_rps, num_requests).tolist()
    row_class = _row_classes(_shares(classes, shares), class_rng.random(num_requests))
    prompt_tokens = _lengths(classes, row_class, length_rng.random(num_requests)).tolist()
    names = [list(classes)[index] for index in row_class.tolist()]
    return [
        Request(
            id=row,
            arrival_s=arrival,
            prompt_tokens=tokens,
            ttft_slo_s=slos[name].ttft_s * slo_scale,
            tbt_slo_s=slos[name].tbt_s * slo_scale,
            slo_class=name,
            abandon_s=abandon_s,
        )
        for row, (arrival, tokens, name) in enumerate(zip(arrival_s, prompt_tokens, names, strict=True))
    ]


def uniform(
    *,
    rate_rps: float,
    num_requests: int,
    min_tokens: int,
    max_tokens: int,
    ttft_slo_s: float,
    slo_scale: float = 1.0,
    output_tokens: int = 1,
    seed: int = 0,
    abandon_s: float = math.inf,
) -> list[Request]:
    """Poisson arrivals of one class, `default`, prompts uniform on `min_tokens`..`max_tokens`, ends included.

    The TTFT SLO is `ttft_slo_s * slo_scale` seconds (`inf` for none); there is no TBT SLO.

    Raises:
        ValueError: an argument out of its range, saying what is allowed.
    """
    _check_count("num_requests", num_requests)
    _check_count("min_tokens", min_tokens)
    _check_count("max_tokens", max_tokens)
    _check_count("output_tokens", output_tokens)
    if max_tokens < min_tokens:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least min_tokens, {min_tokens}")
    _check_slo("ttft_slo_s", ttft_slo_s)
    check_scale(slo_scale)
    arrival_rng, _, length_rng = _streams(seed)
    arrival_s = poisson(arrival_rng, rate_rps, num_requests).tolist()
    prompt_tokens = length_rng.integers(min_tokens, max_tokens, num_requests, endpoint=True).tolist()
    return [
        Request(
            id=row,
            arrival_s=arrival,
            prompt_tokens=tokens,
            output_tokens=output_tokens,
            ttft_slo_s=ttft_slo_s * slo_scale,
            abandon_s=abandon_s,
        )
        for row, (arrival, tokens) in enumerate(zip(arrival_s, prompt_tokens, strict=True))
    ]


def _streams(seed: int) -> list[np.random.Generator]:
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed is {seed!r}; it must be an integer of at least 0")
    children = np.random.SeedSequence(int(seed), spawn_key=(0,)).spawn(3)
    return [np.random.default_rng(child) for child in children]


def _row_classes(shares: Mapping[str, float], level: NDArray[np.float64]) -> NDArray[np.int64]:
    """The class of each row, as its place in `shares`; a class without a share is never chosen."""
    upper = np.cumsum(list(shares.values()))
    return np.searchsorted(upper / upper[-1], level, side="right").astype(np.int64)


def _lengths(
    classes: Mapping[str, LengthClass], row_class: NDArray[np.int64], level: NDArray[np.float64]
) -> NDArray[np.int64]:
    tokens = np.empty(len(level), dtype=np.int64)
    for index, entry in enumerate(classes.values()):
        chosen = row_class == index
        tokens[chosen] = np.rint(entry.prompt_tokens.quantile(level[chosen]))
    return tokens


def _slos(model: str, names: list[str], ttft_slo_s: Mapping[str, float] | None) -> dict[str, ClassSLO]:
    given = dict(ttft_slo_s or {})
    _check_classes("ttft_slo_s", given, names)
    for name, ttft_s in given.items():
        _check_slo(f"ttft_slo_s of class {name}", ttft_s)
    slos = {} if set(given) == set(names) else class_slos(model)
    return slos | {name: ClassSLO(ttft_s=float(ttft_s), tbt_s=TBT_SLO_S[name]) for name, ttft_s in given.items()}


def _shares(classes: Mapping[str, LengthClass], shares: Mapping[str, float] | None) -> dict[str, float]:
    if shares is None:
        return {name: entry.share for name, entry in classes.items()}
    _check_classes("shares", shares, list(classes))
    for name, share in shares.items():
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"the share of class {name} is {share}; it must be within 0..1")
    total = sum(shares.values())
    if abs(total - 1.0) > 1e-6:
        raise ValueError(f"shares sum to {total:.6g}; they must sum to 1")
    return {name: float(shares.get(name, 0.0)) for name in classes}


def _check_classes(key: str, given: Mapping[str, float], names: list[str]) -> None:
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ValueError(f"{key} names the unknown class {unknown[0]!r}; the classes are {', '.join(names)}")


def _check_count(name: str, count: int) -> None:
    if not isinstance(count, int | np.integer) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{name} is {count!r}; it must be an integer of at least 1")


def _check_slo(name: str, slo_s: float) -> None:
    if not slo_s > 0.0:
        raise ValueError(f"{name} is {slo_s}; it must be a number of seconds > 0 (inf for none)")
