"""How a law is stated over a table: what must hold row by row, and what is said where it does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SAME_S", "hold"]

SAME_S = 1e-7  # sums of many operator times over hours of simulated time differ by less


def hold(law: str, holds: npt.NDArray[Any] | bool, left: Any, right: Any) -> None:
    """Raises AssertionError for the first row where a law does not hold, with both sides."""
    bad = np.flatnonzero(~np.atleast_1d(np.asarray(holds)))
    if len(bad):
        sides = [side[bad[0]] if isinstance(side, np.ndarray) else side for side in (left, right)]
        raise AssertionError(f"{law}: row {bad[0]} has {sides[0]!r} against {sides[1]!r} ({len(bad)} such rows)")
