"""Attainment read from the figures of runs, and what several seeds say about where it crosses a target."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from flowsim.study.points import Figures

__all__ = ["checked_target", "confidence", "crossing", "shares", "worst"]

NONE_MEASURED = (
    "warmup_s, cooldown_s or horizon_s leave all its requests out; at a higher rate a run of as many is shorter: "
    "take more of them, or a lower task.high_rps"
)
Shares = Mapping[str, float]
"""What has to meet the target -> the share of its requests that met their SLO."""


def shares(figures: Figures, measure: str, *, per_class: bool) -> Shares:
    """The one place where a study reads attainment: the figure `measure`, or that of each class.

    Raises:
        ValueError: there is no such figure, or no request of the run that is measured has an SLO.
    """
    if per_class:
        prefix = f"{measure}_by_class."
        found = {name.removeprefix(prefix): share for name, share in figures.items() if name.startswith(prefix)}
    else:
        found = {"all": figures.get(measure)}
    with_slo = {name: float(share) for name, share in found.items() if share is not None}
    if not with_slo:
        why = "no request has an SLO" if figures.get("measured") != 0 else NONE_MEASURED
        raise ValueError(f"the run has no figure {measure!r} to hold against a target: {why}")
    return with_slo


def worst(of_seeds: Sequence[Shares]) -> float:
    """The lowest share of all that have to meet the target, each a mean over the seeds that have it."""
    names = {name for one in of_seeds for name in one}
    means = []
    for name in names:
        found = [one[name] for one in of_seeds if name in one]
        means.append(sum(found) / len(found))
    return min(means)


def crossing(attained: Mapping[float, float], target: float) -> float | None:
    """Where attainment, known at some values and taken to fall between them, first falls below the target.

    Linear in the logarithm of the value between two of them; None where it is below at the lowest value or not
    below at the highest.
    """
    values = sorted(attained)
    for lower, upper in itertools.pairwise(values):
        above, below = attained[lower], attained[upper]
        if above >= target > below:
            return float(lower * (upper / lower) ** ((above - target) / (above - below)))
    return None


def confidence(estimate: float, of_seeds: Sequence[float | None], level: float = 0.95) -> tuple[float, float] | None:
    """An interval around an estimate from one crossing per seed: Student's t in the logarithm.

    None with a single seed, where a seed has no crossing, and where all seeds cross at one point: a workload
    that does not depend on the seed, such as a trace, says nothing about others.
    """
    logs = [math.log(one) for one in of_seeds if one is not None]
    if len(logs) < max(2, len(of_seeds)) or max(logs) == min(logs):
        return None
    half = half_width(logs, level)
    return estimate * math.exp(-half), estimate * math.exp(half)


def half_width(values: Sequence[float], level: float = 0.95) -> float:
    """Half the width of Student's t interval of a mean, of at least two values."""
    from scipy.special import stdtrit

    n = len(values)
    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in values) / (n - 1))
    return float(stdtrit(n - 1, 0.5 + level / 2.0)) * deviation / math.sqrt(n)


def checked_target(target: float) -> float:
    """A target share.

    Raises:
        ValueError: it is not within 0..1.
    """
    if isinstance(target, bool | str) or not 0.0 < target <= 1.0:
        raise ValueError(f"target is {target!r}; it is a share of the requests, above 0 and at most 1, such as 0.9")
    return float(target)
