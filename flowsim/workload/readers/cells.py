"""What one cell of a trace may say: numbers, tokens, times, SLOs, classes, hash ids.

A reader of a cell takes a CSV cell (text) or a JSON value, and answers its meaning or raises a ValueError that
says what is allowed. This module must not know files, columns or rows.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowsim.workload.rows import MAX_TOKENS

__all__ = [
    "REQUIRED",
    "UNITS_PER_S",
    "Field",
    "hashes",
    "integer",
    "seconds",
    "slo",
    "slo_class",
    "time",
    "tokens",
    "tokens_or_none",
]

REQUIRED: Any = object()
UNITS_PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}

_WHOLE = re.compile(r"[+-]?\d{1,20}", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_INFINITY = re.compile(r"\+?inf(inity)?", re.IGNORECASE)


class Field(NamedTuple):
    """What a reader wants of a row: how a cell is read, the columns or keys that may hold it, and what stands for none.

    Of `names` a file may have one; with the default REQUIRED it must. A default of None leaves the column out.
    """

    read: Callable[[Any], Any]
    names: tuple[str, ...]
    default: Any = None


def number(cell: Any) -> int | float:
    """The number a cell says, whole ones exactly; NaN for what is no number in ASCII digits."""
    if type(cell) is int or type(cell) is float:  # as nearly every JSON value is; `True` is neither
        return cell
    if isinstance(cell, str):
        text = cell.strip()
        if _WHOLE.fullmatch(text):
            return int(text)
        return float(text) if _NUMBER.fullmatch(text) else math.nan
    return math.nan


def tokens(cell: Any) -> int:
    """Tokens of a prompt or an output."""
    value = number(cell)
    if not (1 <= value <= MAX_TOKENS and value == int(value)):
        raise ValueError(f"it must be a whole number of tokens within 1..{MAX_TOKENS}")
    return int(value)


def tokens_or_none(cell: Any) -> int:
    """As `tokens`, or 0."""
    return 0 if number(cell) == 0 else tokens(cell)


def integer(cell: Any) -> int:
    """A whole number of at most 64 bits, signed or not."""
    value = number(cell)
    if isinstance(value, float) or not -(2**63) <= value < 2**64:
        raise ValueError("it must be a whole number of at most 64 bits")
    return value


def time(cell: Any) -> int | float:
    """A time in the file's unit, whole ones exactly."""
    value = number(cell)
    if not 0 <= value < math.inf or (isinstance(value, int) and value >= 2**63):
        raise ValueError("it must be a finite number >= 0")
    return value


def slo(cell: Any) -> float:
    """Seconds above 0; an empty cell, null or infinity for none."""
    if cell is None or (isinstance(cell, str) and (not cell.strip() or _INFINITY.fullmatch(cell.strip()))):
        return math.inf
    value = number(cell)
    if not value > 0 or (isinstance(value, int) and value >= 2**63):
        raise ValueError("it must be a number of seconds > 0 (empty or inf for none)")
    return float(value)


def slo_class(cell: Any) -> str:
    """The name of a class, blanks around it cut; `default` for an empty cell or null."""
    if cell is None:
        return "default"
    if not isinstance(cell, str) or any(unicodedata.category(letter) in {"Cc", "Cs"} for letter in cell.strip()):
        raise ValueError("it must be text without control characters")
    return cell.strip() or "default"


def hashes(cell: Any) -> tuple[int, ...]:
    """Hash ids: whole numbers with blanks between them, or a JSON list of them."""
    listed = [] if cell is None else cell.split() if isinstance(cell, str) else cell
    if not isinstance(listed, list):
        raise ValueError("it must be a list of whole numbers")
    try:
        return tuple(map(integer, listed))
    except ValueError:
        raise ValueError("it must be a list of whole numbers of at most 64 bits") from None


def seconds(times: NDArray[Any] | list[int] | list[float], unit: str) -> NDArray[np.float64]:
    """Times in `unit` as seconds after the earliest; whole ones are subtracted before they become floats.

    With a NaN (a row without an arrival) among them they are left as they are, for there is no earliest.
    """
    exact = np.asarray(times)
    if exact.dtype.kind != "i":
        exact = exact.astype(np.float64)
    if np.isnan(exact).any():
        return exact.astype(np.float64)
    if not len(exact):
        return exact.astype(np.float64)
    after: NDArray[np.float64] = (exact - exact.min()) / UNITS_PER_S[unit]
    return after
