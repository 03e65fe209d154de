"""What moved between a baseline's figures and today's, and whether it may.

Pure: reads no file, runs nothing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from flowsim.regress.suite import Cell, Figure, Figures

__all__ = ["Move", "Tolerance", "Tolerances", "Verdict", "compare"]

HIGHER_IS_BETTER = ("attainment*", "goodput*")
LOWER_IS_BETTER = (
    "ttft_s*", "tbt_s*", "longest_wait_s*", "suspended_s*", "preemptions.blocking_s*", "rejected*", "unfinished",
)  # fmt: skip


class Verdict(enum.Enum):
    """How a figure stands to its record; the order is that of a report."""

    UNRECORDED = "unrecorded"  # the whole run
    WORSE = "worse"
    MOVED = "moved"  # neither way is better
    GONE = "gone"
    BETTER = "better"
    NEW = "new"

    @property
    def fails(self) -> bool:
        return self not in (Verdict.BETTER, Verdict.NEW)


ORDER = list(Verdict)


@dataclass(frozen=True)
class Tolerance:
    """How far a figure may be from its record: the larger of an amount and a share of the record."""

    absolute: float = 0.0
    relative: float = 0.0

    def room(self, recorded: float) -> float:
        return max(self.absolute, self.relative * abs(recorded))

    def __str__(self) -> str:
        if self == FLOATS:
            return "rounding"
        parts = [f"{self.absolute:g}"] * (self.absolute > 0.0) + [f"{100 * self.relative:g} %"] * (self.relative > 0.0)
        return " or ".join(parts) or "exact"


EXACT, ANYTHING = Tolerance(), Tolerance(absolute=math.inf)
FLOATS = Tolerance(relative=1e-6)  # other versions of numpy or libm round differently
Tolerances = Sequence[tuple[str, Tolerance]]
"""(pattern of figures' names, tolerance): the first that matches holds."""


@dataclass(frozen=True)
class Move:
    """A figure that is out of its tolerance, at the seed where it is furthest out; `seeds` says at how many it is."""

    policy: str
    workload: str
    name: str
    recorded: Figure
    now: Figure
    verdict: Verdict
    allowed: Tolerance
    seeds: int
    of_seeds: int

    @property
    def change(self) -> float | None:
        """Relative to the record; None where one of the two is missing or the record is 0."""
        return None if not self.recorded or self.now is None else self.now / self.recorded - 1.0


def compare(
    cell: Cell, recorded: Sequence[Figures | None], now: Sequence[Figures], tolerances: Tolerances = ()
) -> list[Move]:
    """The figures of a cell that moved, those that fail first; `recorded` and `now` have an entry for each seed.

    A figure with a better side fails only on the other one; any other fails on both. Counts must be equal and floats
    agree to 1e-6, unless a tolerance says otherwise. A figure without a record is `NEW`, one that is recorded and no
    longer there `GONE`; a seed without any record is one `UNRECORDED` move.
    """
    known = [(before, after) for before, after in zip(recorded, now, strict=True) if before is not None]
    moves = []
    if len(known) < len(now):
        missing = len(now) - len(known)
        moves.append(Move(*cell, "everything", None, None, Verdict.UNRECORDED, EXACT, missing, len(now)))
    names = dict.fromkeys(name for pair in known for figures in pair for name in figures)
    for name in names:
        allowed = next((one for pattern, one in tolerances if fnmatchcase(name, pattern)), None)
        judged = [
            (_verdict(name, before, after, allowed), before.get(name), after.get(name)) for before, after in known
        ]
        out = [(verdict, was, is_now) for verdict, was, is_now in judged if verdict is not None]
        if out:
            verdict, was, is_now = min(out, key=_badness)
            allowed = allowed or default(was, is_now)
            moves.append(Move(*cell, name, was, is_now, verdict, allowed, len(out), len(now)))
    return sorted(moves, key=lambda move: ORDER.index(move.verdict))


def _badness(one: tuple[Verdict, Figure, Figure]) -> tuple[int, float]:
    """Sorts seeds: the worst verdict first, then the widest move."""
    verdict, was, is_now = one
    return ORDER.index(verdict), -math.inf if was is None or is_now is None else -abs(is_now - was)


def default(was: Figure, is_now: Figure) -> Tolerance:
    """Counts are exact."""
    return EXACT if isinstance(was, int) and isinstance(is_now, int) else FLOATS


def _verdict(name: str, before: Figures, after: Figures, allowed: Tolerance | None) -> Verdict | None:
    """None where the figure held."""
    was, is_now = before.get(name), after.get(name)
    allowed = allowed or default(was, is_now)
    if allowed == ANYTHING:
        return None
    if name not in before:
        return Verdict.NEW
    if name not in after:
        return Verdict.GONE
    if was == is_now:
        return None
    if was is None or is_now is None:
        return Verdict.MOVED
    if abs(is_now - was) <= allowed.room(was):
        return None
    for patterns, improved in ((HIGHER_IS_BETTER, is_now > was), (LOWER_IS_BETTER, is_now < was)):
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return Verdict.BETTER if improved else Verdict.WORSE
    return Verdict.MOVED


def fails(moves: Sequence[Move]) -> bool:
    """Whether any of them does."""
    return any(move.verdict.fails for move in moves)


def counts(moves: Sequence[Move]) -> Mapping[Verdict, int]:
    """How many of each verdict there are, the absent left out."""
    found = [move.verdict for move in moves]
    return {verdict: found.count(verdict) for verdict in Verdict if verdict in found}
