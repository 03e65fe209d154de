"""How much work a workload asks for, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from flowsim.core import Request
from flowsim.latency import LatencyModel

__all__ = ["offered_load"]


def offered_load(requests: Sequence[Request], instances: Iterable[tuple[int, LatencyModel]]) -> float | None:
    """The requests' rate as a share of the rate that kept all GPUs busy, each request run alone.

    Above 1 no schedule keeps up without batching, whose gain is small for long prompts. It is `offered_load` of
    `summary.json`.

    Args:
        requests: in order of arrival.
        instances: how many of those that requests are sent to are of each kind of hardware, bound to its pass size and
            stops.

    Returns:
        None where there is no rate: fewer than two requests, or all at one instant.
    """
    span_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    if not span_s > 0.0:
        return None
    lengths, counts = np.unique([request.prompt_tokens for request in requests], return_counts=True)
    capacity_rps = 0.0
    for number, latency in instances:
        gpu_s = np.array([latency.isolated_s(length) for length in lengths.tolist()]) - latency.profile.request_s
        capacity_rps += number * len(requests) / float(gpu_s @ counts)
    return (len(requests) - 1) / span_s / capacity_rps
