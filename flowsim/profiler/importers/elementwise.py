"""Operators that compute next to nothing (norms, rope, activation, adds, embedding): estimated from bandwidth.

Where Vidur measured them on the GPU, its table is read instead, at an equal number of bytes moved.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from flowsim.profiler.importers.rows import Origin, operator_rows
from flowsim.profiler.importers.vidur import ELEMENTWISE, SOFTWARE, operator_times
from flowsim.profiler.models import Gpu, Rank

__all__ = ["estimated", "from_vidur"]

TOKENS = 2 ** np.arange(16)
BANDWIDTH_SHARE = 0.8
LAUNCH_S = 3.0e-6
"""Share of the memory bandwidth that is reached, and the floor of a launch: aiconfigurator-core's own corrections
(`mem_bw_empirical_scaling_factor`, `mem_empirical_constant_latency` in its systems/*.yaml)."""


def estimated(origin: Origin, rank: Rank, gpu: Gpu, operators: tuple[str, ...] = ()) -> pd.DataFrame:
    """Launch floor + bytes / reached bandwidth, at powers of two of tokens to 32768; all operators, or those named."""
    origin = replace(origin, statistic="estimate")
    frames = []
    for operator, bytes_per_token in rank.moved_bytes_per_token.items():
        if operators and operator not in operators:
            continue
        seconds = LAUNCH_S + TOKENS * bytes_per_token / (BANDWIDTH_SHARE * gpu.bandwidth_bytes_per_s)
        source = f"estimated (bytes moved over {BANDWIDTH_SHARE:g} of the memory bandwidth, plus {1e6 * LAUNCH_S:g} us)"
        frames.append(operator_rows(origin, operator, seconds, source, new_tokens=TOKENS))
    return pd.concat(frames, ignore_index=True)


def from_vidur(origin: Origin, rank: Rank, table: Path, measured: Rank) -> pd.DataFrame:
    """Vidur's medians for the measured model's rank, as times of this rank.

    Where the two move the same bytes for a token the points are Vidur's; elsewhere the times of an equal number
    of bytes, between Vidur's points, and said so. `qk_norm`, which Vidur lacks, is a norm of as many bytes.

    Raises:
        ValueError: a column or the TP degree that is not in the table.
    """
    origin = replace(origin, statistic="median", software=SOFTWARE)
    frames = []
    for operator, bytes_per_token in rank.moved_bytes_per_token.items():
        like = ELEMENTWISE.get(operator, "input_layernorm")
        times_s = operator_times(table, like, measured.tp)
        theirs = measured.moved_bytes_per_token[operator if operator in ELEMENTWISE else "input_norm"]
        source = f"vidur {like} of {measured.shapes.name}" + (f" at tp {measured.tp}" if measured.tp > 1 else "")
        if bytes_per_token != theirs:
            times_s = _at_equal_bytes(times_s, bytes_per_token / theirs)
            source += " (at equal bytes)"
        frames.append(operator_rows(origin, operator, times_s, source, new_tokens=times_s.index))
    return pd.concat(frames, ignore_index=True)


def _at_equal_bytes(times_s: pd.Series, ratio: float) -> pd.Series:
    """The curve of an operator that moves `ratio` times as many bytes for a token, inside the measured range."""
    tokens = times_s.index.to_numpy(dtype=float)
    wanted = tokens[(tokens * ratio >= tokens[0]) & (tokens * ratio <= tokens[-1])]
    values = np.interp(wanted * ratio, tokens, times_s.to_numpy(dtype=float))
    return pd.Series(values, index=wanted.astype(int))
