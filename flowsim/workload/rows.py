"""A workload as columns: what readers and generators make, what shaping changes, and what becomes requests.

This module must not know any file format, arrival process or rule for SLOs.
"""

from __future__ import annotations

import gc
import math
from collections import deque
from dataclasses import dataclass, fields
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowsim.core import Request

__all__ = ["MAX_TOKENS", "Rows"]

MAX_TOKENS = 2**31 - 1


@dataclass(slots=True, kw_only=True, repr=False)
class Rows:
    """Columns of one length, a row per request. Seconds are float64 and tokens int64.

    An SLO or `abandon_s` of `inf` means none. `prefix_hashes` is None where no row has any; a row's ids name its
    prompt's leading blocks, equal ids being equal content behind equal prefixes. `has_slos` is whether the SLO
    columns were given, or are only a default of none.
    """

    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    ttft_slo_s: NDArray[np.float64]
    tbt_slo_s: NDArray[np.float64]
    abandon_s: NDArray[np.float64]
    slo_class: list[str]
    prefix_hashes: list[tuple[int, ...]] | None = None
    has_slos: bool = False

    @staticmethod
    def of(arrival_s: NDArray[np.float64], prompt_tokens: NDArray[np.int64], **columns: Any) -> Rows:
        """Rows of these columns; those not given are one output token, class `default`, no SLO, no client time-out."""
        n = len(arrival_s)
        never = np.full(n, math.inf)
        given: dict[str, Any] = {
            "output_tokens": np.ones(n, dtype=np.int64),
            "ttft_slo_s": never,
            "tbt_slo_s": never,
            "abandon_s": never,
            "slo_class": ["default"] * n,
        } | columns
        return Rows(arrival_s=arrival_s, prompt_tokens=prompt_tokens, **given)

    def __repr__(self) -> str:
        return f"Rows({len(self)} requests, classes {sorted(set(self.slo_class))})"

    def __len__(self) -> int:
        return len(self.arrival_s)

    def take(self, rows: NDArray[np.int64]) -> Rows:
        """The rows at these positions, in this order."""
        places = rows.tolist()
        hashes = self.prefix_hashes
        return Rows(
            arrival_s=self.arrival_s[rows],
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            ttft_slo_s=self.ttft_slo_s[rows],
            tbt_slo_s=self.tbt_slo_s[rows],
            abandon_s=self.abandon_s[rows],
            slo_class=[self.slo_class[place] for place in places],
            prefix_hashes=None if hashes is None else [hashes[place] for place in places],
            has_slos=self.has_slos,
        )

    def requests(self) -> list[Request]:
        """The rows as requests, `id` being the row.

        The columns have been checked, so a request's own checks are not run again: slots are filled a column at a
        time, which is much faster for a million rows.
        """
        values: dict[str, Any] = {
            "id": range(len(self)),
            "arrival_s": self.arrival_s.tolist(),
            "prompt_tokens": self.prompt_tokens.tolist(),
            "output_tokens": self.output_tokens.tolist(),
            "ttft_slo_s": self.ttft_slo_s.tolist(),
            "tbt_slo_s": self.tbt_slo_s.tolist(),
            "slo_class": self.slo_class,
            "prefix_hashes": repeat(()) if self.prefix_hashes is None else self.prefix_hashes,
            "abandon_s": self.abandon_s.tolist(),
        }
        requests = _blank_requests(len(self))
        for field in fields(Request):
            slot = getattr(Request, field.name)
            deque(map(slot.__set__, requests, values[field.name]), maxlen=0)
        return requests


def _blank_requests(rows: int) -> list[Request]:
    """Requests without values; the collector, which would walk them all time and again, rests meanwhile."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return list(map(object.__new__, repeat(Request, rows)))
    finally:
        if collects:
            gc.enable()
