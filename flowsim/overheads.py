"""Overheads in place of a profile's own, for what-if runs. Knows profiles; reads none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flowsim.names import unknown
from flowsim.profile import Profile

__all__ = ["with_overheads"]

OVERHEADS = ("pass_s", "request_s", "check_s", "switch_s")


def with_overheads(profile: Profile, given: Mapping[str, float | None]) -> Profile:
    """The same hardware with other overheads, in seconds; None keeps the profile's.

    Raises:
        ValueError: a name that is none of them, or a number that is not finite and at least 0.
    """
    for name, seconds in given.items():
        if name not in OVERHEADS:
            raise ValueError(unknown("key", f"overheads.{name}", [f"overheads.{one}" for one in OVERHEADS]))
        if seconds is not None and (isinstance(seconds, bool | str) or not 0.0 <= seconds < math.inf):
            raise ValueError(f"overheads.{name} is {seconds!r}; it must be finite seconds of at least 0, or null")
    chosen: dict[str, Any] = {name: float(seconds) for name, seconds in given.items() if seconds is not None}
    return replace(profile, **chosen)
