"""Names that a user gives: where the shipped choices lie, and the one wording for a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

__all__ = ["near_names", "shipped", "unknown"]


def shipped(folder: str) -> Path:
    """The folder `conf` or `profiles`: inside an installed package, or beside it in a checkout."""
    inside = Path(__file__).parent / folder
    return inside if inside.is_dir() else Path(__file__).parent.parent / folder


def near_names(given: str, choices: Iterable[str], cutoff: float = 0.5) -> str:
    """``did you mean 'b200'?``, or nothing where no choice is as near as `cutoff` (0 any, 1 the same)."""
    near = difflib.get_close_matches(given.lower(), sorted(set(choices)), n=3, cutoff=cutoff)
    return "did you mean " + " or ".join(repr(name) for name in near) + "? " if near else ""


def unknown(kind: str, given: object, choices: Iterable[str], where: str = "") -> str:
    """For example ``unknown gpu 'b100' for model=x; did you mean 'b200'? Choices: b200, h100``."""
    names = sorted(set(choices))
    subject = f"unknown {kind} {str(given)!r}" + (f" {where}" if where else "")
    if not names:
        return f"{subject}; there is none to choose"
    return f"{subject}; {near_names(str(given), names)}Choices: {', '.join(names)}"
