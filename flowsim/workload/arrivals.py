"""When requests arrive: point processes in seconds, the first arrival always at 0.

This module must not know what arrives: lengths, classes and SLOs are drawn elsewhere, from other streams.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["poisson"]


def poisson(rng: np.random.Generator, rate_rps: float, n: int) -> NDArray[np.float64]:
    """Arrival seconds of `n` requests of a Poisson process with `rate_rps` requests per second.

    Gaps are exponential with mean `1 / rate_rps`. The process is shifted so that the first request arrives
    at 0: `n` arrivals have `n - 1` gaps, and the rate of a draw is `(n - 1) / (last - first)`. The gaps are
    drawn at unit rate and divided by the rate, so one generator state gives the same pattern at every rate,
    and a longer workload begins with the shorter one.

    Raises:
        ValueError: `rate_rps` is not a finite number above 0, or so small that an arrival is not finite;
            `n` is not an integer of at least 1.
    """
    if not 0.0 < rate_rps < math.inf:
        raise ValueError(f"rate_rps is {rate_rps}; it must be a finite number of requests per second > 0")
    if not isinstance(n, int | np.integer) or isinstance(n, bool) or n < 1:
        raise ValueError(f"the number of arrivals is {n!r}; it must be an integer of at least 1")
    unit_rate = np.concatenate(([0.0], np.cumsum(rng.standard_exponential(n - 1))))
    with np.errstate(over="ignore"):
        arrival_s: NDArray[np.float64] = unit_rate / rate_rps
    if not math.isfinite(arrival_s[-1]):
        raise ValueError(f"rate_rps is {rate_rps}; {n} arrivals at this rate take longer than a float can say")
    return arrival_s
