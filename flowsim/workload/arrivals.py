"""When requests arrive: point processes in seconds, the first arrival always at 0.

A process is drawn at unit rate and stretched, so that one random stream gives the same pattern at every rate, and a
longer workload begins with the shorter one. This module must not know what arrives: lengths, classes and SLOs are
drawn elsewhere, from other streams.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flowsim.names import unknown

__all__ = ["ArrivalProcess", "Deterministic", "Diurnal", "Gamma", "OnOff", "Poisson", "Weibull", "arrival_times"]

Times = NDArray[np.float64]


class ArrivalProcess(Protocol):
    """A stationary or periodic stream of arrivals."""

    def times(self, rng: np.random.Generator, rate_rps: float, n: int) -> Times:
        """`n` arrival seconds at a mean rate of `rate_rps`, rising, the first at 0."""
        ...


def arrival_times(process: object, rng: np.random.Generator, rate_rps: float, n: int) -> Times:
    """`n` arrival seconds of a process given as an object, a name, or ``{name: {parameter: value}}``.

    `n` arrivals have `n - 1` gaps, and the rate of a draw is `(n - 1) / (last - first)`.

    Raises:
        ValueError: `rate_rps` is not a finite number above 0, or so small that an arrival is not finite; `n` is not
            an integer of at least 1; an unknown process or parameter.
    """
    if not 0.0 < rate_rps < math.inf:
        raise ValueError(f"rate_rps is {rate_rps}; it must be a finite number of requests per second > 0")
    if not isinstance(n, int | np.integer) or isinstance(n, bool) or n < 1:
        raise ValueError(f"the number of arrivals is {n!r}; it must be an integer of at least 1")
    with np.errstate(over="ignore"):
        arrival_s = _process(process).times(rng, rate_rps, n)
    if not math.isfinite(arrival_s[-1]):
        raise ValueError(f"rate_rps is {rate_rps}; {n} arrivals at this rate take longer than a float can say")
    return arrival_s


def _stretched(gaps: Times, rate_rps: float) -> Times:
    """Arrivals with these gaps of mean 1, at a rate."""
    times: Times = np.concatenate(([0.0], np.cumsum(gaps))) / rate_rps
    return times


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent exponential gaps."""

    def times(self, rng: np.random.Generator, rate_rps: float, n: int) -> Times:
        return _stretched(rng.standard_exponential(n - 1), rate_rps)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Independent gamma gaps with a coefficient of variation `cv` within 0..20: 1 is Poisson, above it is burstier."""

    cv: float = 2.0

    def __post_init__(self) -> None:
        _positive("gamma.cv", self.cv, most=20.0)  # beyond, a few gaps are everything and no mean rate is kept

    def times(self, rng: np.random.Generator, rate_rps: float, n: int) -> Times:
        shape = 1.0 / self.cv**2
        return _stretched(rng.standard_gamma(shape, n - 1) / shape, rate_rps)


@dataclass(frozen=True, slots=True)
class Weibull:
    """Independent Weibull gaps of shape `shape` > 0.1: 1 is Poisson, below it is burstier."""

    shape: float = 0.7

    def __post_init__(self) -> None:
        _positive("weibull.shape", self.shape, least=0.1)

    def times(self, rng: np.random.Generator, rate_rps: float, n: int) -> Times:
        return _stretched(rng.weibull(self.shape, n - 1) / math.gamma(1.0 + 1.0 / self.shape), rate_rps)


@dataclass(frozen=True, slots=True)
class Deterministic:
    """Equal gaps."""

    def times(self, rng: np.random.Generator, rate_rps: float, n: int) -> Times:
        return np.arange(n, dtype=np.float64) / rate_rps


@dataclass(frozen=True, slots=True)
class OnOff:
    """Poisson bursts: `on_s` seconds at one rate, `off_s` at `off_share` of it, and again.

    The mean rate is the one asked.
    The first burst begins with the first arrival.
    """

    on_s: float = 5.0
    off_s: float = 15.0
    off_share: float = 0.0

    def __post_init__(self) -> None:
        _positive("on_off.on_s", self.on_s)
        _positive("on_off.off_s", self.off_s)
        if not 0.0 <= self.off_share <= 1.0:
            raise ValueError(f"on_off.off_share is {self.off_share}; it must be within 0..1")

    def times(self, rng: np.random.Generator, rate_rps: float, n: int) -> Times:
        steps = [(0.0, 1.0), (self.on_s, self.off_share)]
        return _modulated(rng, rate_rps, n, steps, self.on_s + self.off_s)


@dataclass(frozen=True, slots=True)
class Diurnal:
    """A Poisson process whose rate follows a profile, step by step, again and again; the mean rate is the one asked.

    `profile` is a list of [second, rate] pairs or the path of a CSV with columns `t_s,rate`; only the ratios of the
    rates matter. `period_s` is when it begins again (None: a day, or the last second and a step if that is later).
    """

    profile: Any = field(default=())
    period_s: float | None = None

    def times(self, rng: np.random.Generator, rate_rps: float, n: int) -> Times:
        steps = _profile(self.profile)
        last_s = steps[-1][0]
        step_s = last_s - steps[-2][0] if len(steps) > 1 else 0.0
        period_s = self.period_s if self.period_s is not None else max(86400.0, last_s + step_s)
        if not last_s < period_s < math.inf:
            raise ValueError(f"diurnal.period_s is {period_s}; it must be after the profile's last second, {last_s}")
        return _modulated(rng, rate_rps, n, steps, period_s)


def _modulated(
    rng: np.random.Generator, rate_rps: float, n: int, steps: list[tuple[float, float]], period_s: float
) -> Times:
    """A Poisson process with a periodic rate in steps of (second, weight): unit-rate arrivals, put through the
    inverse of the expected number of arrivals."""
    begins_s = np.array([second for second, _ in steps] + [period_s])
    weights = np.array([weight for _, weight in steps])
    expected = np.concatenate(([0.0], np.cumsum(weights * np.diff(begins_s))))
    expected *= rate_rps * period_s / expected[-1]
    unit = np.concatenate(([0.0], np.cumsum(rng.standard_exponential(n - 1))))
    periods, rest = np.divmod(unit, expected[-1])
    step = np.searchsorted(expected, rest, side="right") - 1  # never one without arrivals: `expected` is flat there
    rate = weights * (expected[-1] / (weights * np.diff(begins_s)).sum())
    times: Times = periods * period_s + begins_s[step] + (rest - expected[step]) / rate[step]
    begun: Times = times - times[0]
    return begun


def _profile(given: Any) -> list[tuple[float, float]]:
    """The steps of a rate profile, checked."""
    if isinstance(given, str | Path):
        given = _read_profile(Path(given))
    try:
        steps = [(float(second), float(rate)) for second, rate in given]
    except (TypeError, ValueError):
        raise ValueError(f"diurnal.profile is {given!r:.80}; it must be [second, rate] pairs or a CSV's path") from None
    if not steps or steps[0][0] != 0.0:
        raise ValueError("diurnal.profile must have at least one step, and the first at second 0")
    for (before_s, _), (second, _) in pairwise(steps):
        if not before_s < second < math.inf:
            raise ValueError(f"diurnal.profile: second {second} follows {before_s}; seconds must rise")
    for second, rate in steps:
        if not 0.0 <= rate < math.inf:
            raise ValueError(f"diurnal.profile: the rate at second {second} is {rate}; it must be finite and >= 0")
    if not any(rate for _, rate in steps):
        raise ValueError("diurnal.profile: every rate is 0")
    return steps


def _read_profile(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot read the rate profile: {error}") from error
    if not lines or [name.strip() for name in lines[0].split(",")] != ["t_s", "rate"]:
        raise ValueError(f"{path}: line 1 is {lines[0] if lines else ''!r:.60}; a rate profile begins with t_s,rate")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        cells = line.split(",")
        try:
            rows.append((cells[0], cells[1]))
            float(cells[0]), float(cells[1])
        except (IndexError, ValueError):
            raise ValueError(f"{path}: line {number} is {line!r:.60}; it must be two numbers, t_s,rate") from None
    return rows


def _positive(name: str, value: float, least: float = 0.0, most: float = math.inf) -> None:
    if not isinstance(value, int | float) or not (least < value < math.inf and value <= most):
        bound = "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"{name} is {value!r}; it must be a finite number > {least:g}{bound}")


PROCESSES: dict[str, type] = {
    "poisson": Poisson,
    "gamma": Gamma,
    "weibull": Weibull,
    "deterministic": Deterministic,
    "on_off": OnOff,
    "diurnal": Diurnal,
}


def _process(given: object) -> ArrivalProcess:
    """A process given as itself, by a shipped or dotted name, or as one name with its parameters."""
    parameters: Mapping[str, Any] = {}
    if isinstance(given, Mapping) and len(given) == 1:
        given, parameters = next(iter(given.items()))
    if not isinstance(parameters or {}, Mapping):
        raise ValueError(f"workload.arrivals {given} has {parameters!r:.60}; give {{{given}: {{parameter: value}}}}")
    if not isinstance(given, str):
        if hasattr(given, "times"):
            return given
        raise ValueError(f"workload.arrivals is {given!r:.80}; it must be a name or {{name: {{parameter: value}}}}")
    kind = PROCESSES.get(given) or _imported(given)
    taken = list(inspect.signature(kind).parameters)
    for name in parameters or {}:
        if name not in taken:
            raise ValueError(unknown("parameter", name, taken, where=f"of the arrivals {given}"))
    return kind(**(parameters or {}))  # type: ignore[no-any-return]


def _imported(name: str) -> type:
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(unknown("workload.arrivals", name, PROCESSES) + "; or the dotted path of your own")
    try:
        found: type = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"workload.arrivals {name!r} cannot be imported: {error}") from error
    return found
