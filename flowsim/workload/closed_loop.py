"""Closed loop: users who wait for their first token, think, and ask again. The load follows the system's speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from flowsim.core import Request
from flowsim.workload.synthetic import quantiles, streams

__all__ = ["ClosedLoop", "closed_loop"]


class ClosedLoop:
    """A workload whose arrivals depend on the run: each user has one request under way at a time.

    What each user asks, one after the other, and how long it thinks, is drawn beforehand, so that every policy meets
    the same users. Args:
        templates: all requests; user u asks the u-th, the (u + users)-th and so on. Their arrivals are not used.
        think_s: seconds of thinking before each of them.
        users: how many users.
    """

    def __init__(self, templates: Sequence[Request], think_s: Sequence[float], users: int) -> None:
        self.users = users
        self._templates = templates
        self._think_s = think_s

    def __len__(self) -> int:
        return len(self._templates)

    def first(self) -> list[Request]:
        """Each user's first request, after a first time of thinking."""
        first = range(min(self.users, len(self._templates)))
        return [replace(self._templates[user], arrival_s=self._think_s[user]) for user in first]

    def after(self, request: Request, finish_s: float) -> Request | None:
        """The next request of the user who asked this one and had its answer (or was refused) at `finish_s`."""
        following = request.id + self.users
        if following >= len(self._templates):
            return None
        return replace(self._templates[following], arrival_s=finish_s + self._think_s[following])


def closed_loop(
    *,
    users: int = 32,
    think_s: float = 5.0,
    table: str = "qwentrace",
    num_requests: int = 5000,
    shares: Mapping[str, float] | None = None,
    slo: str = "auto",
    ttft_slo_s: float | Mapping[str, float] | None = None,
    slo_scale: float = 1.0,
    max_context_tokens: int | None = None,
    model: str = "llama3-8b",
    isolated_s: Callable[[int], float] | None = None,
    seed: int = 0,
) -> ClosedLoop:
    """Users with lengths and classes from a quantile table.

    Args:
        users: how many.
        think_s: mean seconds between an answer's first token and the next question, exponential.
        table, shares, slo, ttft_slo_s, slo_scale, max_context_tokens, model, isolated_s, seed: as in `quantiles`.
        num_requests: of all users together.

    Raises:
        ValueError: an argument out of its range.
    """
    if not isinstance(users, int) or users < 1:
        raise ValueError(f"users is {users!r}; it must be a whole number of at least 1")
    if not 0.0 <= think_s < math.inf:
        raise ValueError(f"think_s is {think_s}; it must be a finite number >= 0")
    templates = quantiles(
        table=table,
        rate_rps=1.0,
        num_requests=num_requests,
        shares=shares,
        slo=slo,
        ttft_slo_s=ttft_slo_s,
        slo_scale=slo_scale,
        max_context_tokens=max_context_tokens,
        model=model,
        isolated_s=isolated_s,
        seed=seed,
    )
    thinking = streams(seed)[0].standard_exponential(num_requests) * think_s
    return ClosedLoop(templates, np.asarray(thinking).tolist(), users)
