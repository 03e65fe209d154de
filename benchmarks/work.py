"""The work that simulators are compared on, from the standard library alone: each makes it for itself, alike."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

RATE_RPS = 5.0
MEAN_TOKENS = 1600.0
SIGMA = 0.8
TTFT_SLO_S = 2.0


def prompts(count: int, seed: int = 0) -> Iterator[tuple[float, int]]:
    """(arrival in seconds, prompt tokens): Poisson arrivals, lognormal prompts of mean 1600 tokens, at most 32768."""
    stream = random.Random(seed)
    mu = math.log(MEAN_TOKENS) - 0.5 * SIGMA**2
    at_s = 0.0
    for _ in range(count):
        at_s += stream.expovariate(RATE_RPS)
        yield at_s, min(32_768, max(1, round(stream.lognormvariate(mu, SIGMA))))
