"""A workload written down as a trace that replays it, and described in two lines.

This module must not know how requests were made.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flowsim.core import Request

__all__ = ["describe", "write_trace"]

FIELDS = ("arrival_s", "prompt_tokens", "output_tokens", "slo_class", "ttft_slo_s", "tbt_slo_s", "abandon_s")


def write_trace(requests: Sequence[Request], path: str | Path) -> Path:
    """Writes requests as a plain CSV trace; `+workload=trace workload.path=PATH` replays it exactly.

    Floats are written so that they read back exactly. `prefix_hashes`, a column of whole numbers separated by blanks,
    is there where a request has any.
    """
    path = Path(path)
    hashed = any(request.prefix_hashes for request in requests)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*FIELDS, *["prefix_hashes"] * hashed])
        for request in requests:
            cells = [getattr(request, name) for name in FIELDS]
            writer.writerow([*cells, *[" ".join(map(str, request.prefix_hashes))] * hashed])
    return path


def describe(requests: Sequence[Request]) -> str:
    """Two lines: how many arrive how fast and how evenly, and of what length and class."""
    if not requests:
        return "no requests\n"
    arrival_s = np.array([request.arrival_s for request in requests])
    prompts = np.array([request.prompt_tokens for request in requests])
    gaps_s = np.diff(arrival_s)
    span_s = float(arrival_s[-1] - arrival_s[0])
    rate = f"{(len(requests) - 1) / span_s:.4g} requests/s" if span_s > 0.0 else "all at once"
    spread = f", gaps' CV {gaps_s.std() / gaps_s.mean():.2f}" if span_s > 0.0 else ""
    p50, p90, p99 = np.percentile(prompts, [50, 90, 99])
    counts = Counter(request.slo_class for request in requests).most_common()
    classes = ", ".join(f"{name} {count / len(requests):.1%}" for name, count in counts[:6])
    return (
        f"{len(requests)} requests over {span_s:.6g} s, {rate}{spread}\n"
        f"prompt tokens: mean {prompts.mean():.0f}, p50 {p50:.0f}, p90 {p90:.0f}, p99 {p99:.0f}, max {prompts.max()}; "
        f"classes: {classes}"
    )
