"""What was read from a trace, as data and in two lines.

This module must not know how a file is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Percentiles", "TraceSummary", "counted", "some"]

SHOWN_ROWS = 5


class Percentiles(NamedTuple):
    """Three percentiles of token counts, straight lines between neighbours."""

    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(tokens: NDArray[np.int64]) -> Percentiles:
        return Percentiles(*np.percentile(tokens, [50, 90, 99]).tolist())

    def __str__(self) -> str:
        return f"p50 {self.p50:.6g}, p90 {self.p90:.6g}, p99 {self.p99:.6g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """What was read from a trace.

    `rows` requests were kept; `dropped` has one sentence for each bad row that was not, naming its line or index, and
    `dropped_by_reason` counts all rows left out, by the column or the kind of fault, those too that the format's own
    rule leaves out. `time_unit` is that of the file (`date` for dates), `block_tokens` the tokens that one hash id
    names (None where the format does not say). A row is out of order if an earlier row arrives later. `rate_rps` is
    `(rows - 1) / span_s`, None for a span of 0. `clamped_turns` follow-up turns had no new block. `has_slos` says
    whether the file has a column of SLOs, whatever is in it.
    """

    path: str
    format: str
    time_unit: str
    rows: int
    span_s: float
    rate_rps: float | None
    prompt_tokens: Percentiles
    output_tokens: Percentiles
    has_slos: bool
    block_tokens: int | None
    dropped: tuple[str, ...]
    dropped_by_reason: Mapping[str, int]
    columns_ignored: tuple[str, ...]
    rows_out_of_order: int
    clamped_turns: int
    warnings: tuple[str, ...]

    def describe(self) -> str:
        """Two lines: what was read and at which rate, and what its lengths are and was left out."""
        rate = "all at once" if self.rate_rps is None else f"{self.rate_rps:.4g} requests/s"
        dropped = ", ".join(f"{count} for {reason}" for reason, count in self.dropped_by_reason.items())
        clamped = f"; {counted(self.clamped_turns, 'turn')} without a new block" if self.clamped_turns else ""
        return (
            f"{self.path}: format {self.format}, time unit {self.time_unit}: "
            f"{counted(self.rows, 'request')} over {self.span_s:.6g} s, {rate}\n"
            f"prompt tokens {self.prompt_tokens}; output tokens {self.output_tokens}{clamped}; "
            f"rows left out: {dropped or 'none'}; columns ignored: {', '.join(self.columns_ignored) or 'none'}"
        )


def counted(count: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def some(rows: tuple[str, ...]) -> str:
    """The first few sentences, and how many more there are."""
    more = f"; and {len(rows) - SHOWN_ROWS} more" if len(rows) > SHOWN_ROWS else ""
    return "; ".join(rows[:SHOWN_ROWS]) + more
