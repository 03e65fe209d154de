"""When each token of a request came out, and what follows: the times between its tokens (TBT).

A run logs the steps of each instance that gave tokens, and for each request from which of them its tokens are; no
event and no row for a token. Here the times are put together again.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from flowsim.log import Columns

__all__ = ["step_ends_s", "tbt_columns", "token_times_s"]

Floats = npt.NDArray[np.float64]


def step_ends_s(steps: Columns) -> dict[int, Floats]:
    """For each instance the second at which each of its steps gave its tokens out, by the step's number."""
    counts = steps["steps"]
    row = np.repeat(np.arange(len(counts)), counts)
    begun = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)  # steps of the row before this one

    def lasts_s(number: npt.NDArray[np.int64], first_s: Floats, growth_s: Floats) -> Floats:
        lasts: Floats = number * (first_s + 0.5 * (number - 1) * growth_s)
        return lasts

    step_s, growth_s = steps["step_s"][row], steps["growth_s"][row]
    ends_s = steps["end_s"][row] - lasts_s(counts[row], step_s, growth_s) + lasts_s(begun + 1, step_s, growth_s)
    instance = steps["instance"][row]
    return {number: ends_s[instance == number] for number in np.unique(steps["instance"]).tolist()}


def token_times_s(steps: Columns, tokens: Columns, first_token_s: Floats) -> dict[int, Floats]:
    """For each request that got more tokens than the first the second of each of its tokens.

    `first_token_s` by request: the first token of one that was prefilled elsewhere is in no step of its decodes.
    """
    ends_s = step_ends_s(steps)
    times: dict[int, Floats] = {}
    began_s = np.empty(len(tokens["request"]))
    for instance, of_instance_s in ends_s.items():
        rows = tokens["instance"] == instance
        began_s[rows] = of_instance_s[tokens["first_step"][rows]]
    order = np.lexsort((began_s, tokens["request"]))
    columns = (tokens[name][order].tolist() for name in ("request", "instance", "first_step", "last_step"))
    for request, instance, first, last in zip(*columns, strict=True):
        run = ends_s[instance][first:last]
        if request in times:
            times[request] = np.concatenate([times[request], run])
        elif run[0] > first_token_s[request] + 1e-9:
            times[request] = np.concatenate([first_token_s[request : request + 1], run])
        else:
            times[request] = run
    return times


def tbt_columns(steps: Columns, tokens: Columns, first_token_s: Floats) -> Columns:
    """Mean, 99th percentile and largest of each request's times between tokens, s; NaN for fewer than two tokens."""
    n = len(first_token_s)
    mean_s, p99_s, max_s = (np.full(n, math.nan) for _ in range(3))
    for request, times_s in token_times_s(steps, tokens, first_token_s).items():
        gaps_s = np.diff(times_s)
        if len(gaps_s):
            gaps_s.sort()
            mean_s[request] = (times_s[-1] - times_s[0]) / len(gaps_s)
            place = 0.99 * (len(gaps_s) - 1)
            low = gaps_s[int(place)]
            p99_s[request] = low + (place - int(place)) * (gaps_s[math.ceil(place)] - low)
            max_s[request] = gaps_s[-1]
    return {"tbt_mean_s": mean_s, "tbt_p99_s": p99_s, "tbt_max_s": max_s}
