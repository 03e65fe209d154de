"""The published run of the FlowPrefill system, read from the folder of measured data; simulates nothing.

Llama-3.1-8B on one A800, 327 requests in a minute, of which 323 were printed. Arrivals were not: they are 20
reconstructed draws. The README of the data folder says where each file comes from.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flowsim import Request

__all__ = ["CLASSES", "DRAWS", "RealRun", "data_folder", "real_run"]

CLASSES = ("text", "image", "search", "file")
DRAWS = 20
PREFIX = "flowprefill_a800_llama31_8b"
FILES = tuple(
    f"{PREFIX}_{name}"
    for name in ("requests.csv", "unprinted.csv", "arrivals_posterior.csv.gz", "preemptions.csv", "batches.csv")
)
SPECIAL_TOKENS = 2  # a prompt as tokenised is this much longer than the trace says


@dataclass(frozen=True)
class RealRun:
    """What was measured. `printed` has a row per printed request, in order of arrival; `free` are the trace indices
    of the others, and `unprinted` (class, prompt tokens) what they are, in the file's order. `arrival_s` has a row
    per trace index and a column per draw. Preemptions and batches are of the four runs in the engine's log."""

    printed: pd.DataFrame
    free: tuple[int, ...]
    unprinted: tuple[tuple[str, int], ...]
    arrival_s: NDArray[np.float64]
    preemptions: pd.DataFrame
    batches: pd.DataFrame

    def requests(self, draw: int, order: tuple[int, ...] = (0, 1, 2, 3)) -> list[Request]:
        """The 327 requests at one draw of arrivals; `order[k]` is which unprinted request has the k-th free index."""
        printed = self.printed
        rows = {
            int(index): (name, int(tokens))
            for index, name, tokens in zip(printed.index, printed.request_class, printed.prompt_tokens, strict=True)
        }
        rows |= {index: self.unprinted[place] for index, place in zip(self.free, order, strict=True)}
        slos_s = printed.groupby("request_class").ttft_slo_s.first()
        return [
            Request(
                id=index,
                arrival_s=float(self.arrival_s[index, draw]),
                prompt_tokens=rows[index][1],
                slo_class=rows[index][0],
                ttft_slo_s=float(slos_s[rows[index][0]]),
            )
            for index in sorted(rows)
        ]


def data_folder() -> Path:
    """The folder of measured data: FLOWSIM_DATA, else `../shared/data` beside the checkout."""
    return Path(os.environ.get("FLOWSIM_DATA") or Path(__file__).resolve().parents[1] / "../shared/data")


def real_run(data: Path) -> RealRun:
    """Reads the run.

    Raises:
        FileNotFoundError: a file of it is missing.
    """
    requests, unprinted, arrivals, preemptions, batches = (pd.read_csv(data / name) for name in FILES)
    printed = requests.set_index("trace_index").sort_index()
    arrivals = arrivals.set_index("trace_index").sort_index()
    lengths = unprinted.inferred_trace_input_tokens.str.split().str[0].astype(int) + SPECIAL_TOKENS  # "927 or 928"
    return RealRun(
        printed=printed,
        free=tuple(int(index) for index in arrivals.index if index not in printed.index),
        unprinted=tuple(zip(unprinted.request_class, map(int, lengths), strict=True)),
        arrival_s=arrivals[[f"draw_{draw}_s" for draw in range(DRAWS)]].to_numpy(),
        preemptions=preemptions,
        batches=batches,
    )
