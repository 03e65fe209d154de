"""The highest value at which a falling claim holds: bracketed by doubling and halving, then bisected.

Pure arithmetic, told what was found and asked what to try next; it must not know what the value is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["Search"]


@dataclass
class Search:
    """A search within `low`..`high` from `start`, to the relative `precision`.

    `held` is the highest value found to hold below `failed`, the lowest found to fail; None while there is none.

    Raises:
        ValueError: limits that are not 0 < low <= start <= high, or a precision that is not within 0..1.
    """

    low: float
    high: float
    start: float
    precision: float = 0.01
    held: float | None = field(default=None, init=False)
    failed: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.low <= self.start <= self.high < math.inf:
            raise ValueError(
                f"the bracket is {self.low:g} to {self.high:g} from {self.start:g}; 0 < low <= start <= high"
            )
        if not 0.0 < self.precision < 1.0:
            raise ValueError(f"precision is {self.precision}; it must be within 0..1, such as 0.01")

    def ask(self) -> float | None:
        """The value to try next; None once the answer is known."""
        if self.end is not None:
            return None
        if self.held is None:
            return self.start if self.failed is None else max(self.failed / 2.0, self.low)
        if self.failed is None:
            return min(2.0 * self.held, self.high)
        if self.failed / self.held <= 1.0 + self.precision:
            return None
        return math.sqrt(self.held * self.failed)

    def tell(self, value: float, *, holds: bool) -> None:
        """What was found at a value."""
        if holds:
            self.held = value
        else:
            self.failed = value

    @property
    def end(self) -> str | None:
        """The end of the bracket that was hit: `high` if it holds there, `low` if it fails there."""
        if self.held is not None and self.held >= self.high:
            return "high"
        return "low" if self.failed is not None and self.failed <= self.low else None

    @property
    def left(self) -> int:
        """About how many values are still to be tried."""
        if self.ask() is None:
            return 0
        known = self.held is not None and self.failed is not None
        ratio = self.failed / self.held if known else 2.0  # type: ignore[operator]
        halvings = math.ceil(math.log2(max(math.log(ratio) / math.log1p(self.precision), 1.0)))
        return halvings if known else halvings + 1 + (self.held is None and self.failed is None)
