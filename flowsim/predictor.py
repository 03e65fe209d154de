"""What a scheduler may believe about prefill times, other than the truth (`flowsim.latency.Exact`).

A predictor is made from the latency model of the run and answers in seconds, to the first token of a prompt or
a batch run alone, overheads included. It must give the same answer to the same question.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

from flowsim.latency import NO_DECODES, Decodes, Exact, LatencyModel, Predictor, Tokens
from flowsim.names import unknown

__all__ = ["Noisy", "Poly3"]

GRID_TOKENS = (16, 32, 64, 128, 256, *range(512, 20481, 512))
"""The prompt lengths at which the reference implementation measures isolated TTFTs."""

FULL_CHUNK_TOKENS = 8192  # beyond the grid the reference counts chunks of this many tokens,
FULL_CHUNK_S = 0.01  # each at its own predicted time and this much more
FLOOR_S = 1e-4


class Poly3:
    """FlowPrefill's predictor (arXiv 2602.16603): a polynomial of degree 3 in prompt tokens.

    Fitted by least squares, weighted by 1 / TTFT, to the model's isolated TTFTs on the reference's grid, 16 to
    20480 tokens. Within it the curve never falls and is at least 0.1 ms; beyond it each token costs what a token
    of a full chunk of 8192 does, plus 0.01 s a chunk. A batch is predicted as one prompt of all its tokens. Decodes
    add what the model says that they take: the reference has no predictor of them.
    """

    def __init__(self, latency: LatencyModel) -> None:
        self._latency = latency
        grid = np.array(GRID_TOKENS, dtype=np.float64)
        isolated_s = np.array([latency.isolated_s(tokens) for tokens in GRID_TOKENS])
        fit = np.polynomial.Polynomial.fit(grid, isolated_s, deg=3, w=1.0 / isolated_s)
        curve_s = fit(np.arange(GRID_TOKENS[-1] + 1, dtype=np.float64))
        self._curve_s = list(map(float, np.maximum.accumulate(np.maximum(curve_s, FLOOR_S))))
        self._overhead_s = latency.profile.pass_s + latency.profile.request_s
        self._beyond_s = (self._curve_s[FULL_CHUNK_TOKENS] + FULL_CHUNK_S) / FULL_CHUNK_TOKENS

    def alone_s(self, prompt_tokens: int) -> float:
        """The curve at a prompt length."""
        last = len(self._curve_s) - 1
        if prompt_tokens <= last:
            return self._curve_s[prompt_tokens]
        return self._curve_s[last] + (prompt_tokens - last) * self._beyond_s

    def batch_s(self, tokens: Tokens, decodes: Decodes = NO_DECODES) -> float:
        """The curve at the sum of whole prompts (`pass_s` and `request_s` if there is none); a part with cached
        tokens adds what it lengthens its prompt by."""
        if decodes.sequences:
            decode_s = self._latency.iterations(decodes, 1).total_s
            return decode_s + self.batch_s(tokens) - (self._latency.profile.pass_s if tokens else self._overhead_s)
        whole = sum(new for new, cached in tokens if not cached)
        rest_s = [self.alone_s(cached + new) - self.alone_s(cached) for new, cached in tokens if cached]
        return (self.alone_s(whole) if whole else self._overhead_s) + sum(rest_s)


class Noisy:
    """Another predictor's answers, off by a bias and a spread: times (1 + bias) exp(sigma z), z standard normal.

    z is drawn once for each number of tokens, from the predictor's own random stream, so that the same question
    keeps its answer.

    Args:
        latency: the model of the run.
        base: `exact`, `poly3`, or any predictor's class.
        bias: relative error of the median; above -1.
        sigma: spread of the logarithm; at least 0.
        quantile: what is answered of all that the truth may be, given the estimate: 0.5 is the estimate itself,
            0.9 the time that the truth exceeds once in ten, estimate times exp(sigma z(0.9)). Above 0, below 1.
        seed: of the predictor's stream.

    Raises:
        ValueError: an unknown base, or a bias, sigma or quantile out of range.
    """

    def __init__(
        self,
        latency: LatencyModel,
        *,
        base: str | Callable[[LatencyModel], Predictor] = "exact",
        bias: float = 0.0,
        sigma: float = 0.1,
        quantile: float = 0.5,
        seed: int = 0,
    ) -> None:
        if isinstance(base, str) and base not in BASES:
            raise ValueError(unknown("predictor.base", base, BASES))
        if not (bias > -1.0 and 0.0 <= sigma < math.inf):
            raise ValueError(f"bias is {bias} and sigma {sigma}; bias must be above -1 and sigma at least 0")
        if not 0.0 < quantile < 1.0:
            raise ValueError(f"predictor.quantile is {quantile}; it must be above 0 and below 1")
        make = BASES[base] if isinstance(base, str) else base
        self._base = make(latency)
        self._bias = bias
        self._caution = math.exp(sigma * NormalDist().inv_cdf(quantile))
        self._sigma = sigma
        self._seed = seed
        self._factors: dict[int, float] = {}

    def alone_s(self, prompt_tokens: int) -> float:
        """The base's answer, off by the factor of this prompt length."""
        return self._factor(prompt_tokens) * self._base.alone_s(prompt_tokens)

    def batch_s(self, tokens: Tokens, decodes: Decodes = NO_DECODES) -> float:
        """The base's answer, off by the factor of the batch's new tokens."""
        factor = self._factor(sum(new for new, _ in tokens) + decodes.sequences)
        return factor * (self._base.batch_s(tokens, decodes) if decodes.sequences else self._base.batch_s(tokens))

    def _factor(self, tokens: int) -> float:
        factor = self._factors.get(tokens)
        if factor is None:
            stream = np.random.default_rng(np.random.SeedSequence([self._seed, tokens], spawn_key=(3,)))
            factor = (1.0 + self._bias) * math.exp(self._sigma * float(stream.standard_normal())) * self._caution
            self._factors[tokens] = factor
        return factor


BASES: dict[str, Callable[[LatencyModel], Predictor]] = {"exact": Exact, "poly3": Poly3}
