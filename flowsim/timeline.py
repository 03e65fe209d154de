"""When a batch's operators end, and where it may be stopped: pure floats, no simulator, no policy.

All layers of a pass are alike, so a pass is a head, one layer's five cumulative operator ends, a number of
layers and a tail. The next legal stop is then a division and a short scan, never a walk over operators.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

__all__ = ["INSTANT_S", "OPERATORS", "Iterations", "Pass", "Stop", "Stops", "Timeline"]

OPERATORS = ("qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj")
"""The operators of one layer, in order; each ends at a boundary where a batch may be stopped."""

INSTANT_S = 1e-9
"""Two times closer than this are the same instant (rounding of sums of operator times)."""


class Stops(enum.Enum):
    """Where a running batch may be stopped, coarse to fine."""

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is a call

    REQUEST = "request"
    PASS = "pass"
    LAYER = "layer"
    BLOCK = "block"
    OPERATOR = "operator"

    @property
    def operators(self) -> tuple[int, ...]:
        """The indices into `OPERATORS` after which a batch may stop; empty where a pass is never cut."""
        return _STOP_OPERATORS[self]


_STOP_OPERATORS = {
    Stops.REQUEST: (),
    Stops.PASS: (),
    Stops.LAYER: (4,),
    Stops.BLOCK: (2, 4),
    Stops.OPERATOR: (0, 1, 2, 3, 4),
}


class Pass(NamedTuple):
    """One forward pass, or a stretch of like layers of one. Seconds, relative to its own start.

    `head_s` runs before layer 0 and `tail_s` after the last layer; neither can be stopped. `ends_s[i]` is the
    end of operator i of a layer, counted from the layer's start, so `ends_s[4]` is the layer's length.
    """

    tokens: int
    head_s: float
    ends_s: tuple[float, float, float, float, float]
    layers: int
    tail_s: float

    @property
    def total_s(self) -> float:
        return self.head_s + self.layers * self.ends_s[4] + self.tail_s


class Stop(NamedTuple):
    """A place on a timeline: seconds from its start, and how many operators have ended by then."""

    at_s: float
    operators: int


class Timeline:
    """The passes of one batch back to back, and the places where it may be stopped."""

    __slots__ = ("_starts_s", "end", "passes", "total_s")

    def __init__(self, passes: Iterable[Pass]) -> None:
        self.passes = tuple(passes)
        starts_s, total_s, operators = [], 0.0, 0
        for one in self.passes:
            starts_s.append(total_s)
            total_s += one.total_s
            operators += 5 * one.layers
        self._starts_s = starts_s
        self.total_s = total_s
        self.end = Stop(total_s, operators)

    def next_stop(self, at_s: float, stops: Stops) -> Stop:
        """The first legal stop at or after `at_s` seconds from the timeline's start.

        The end of the timeline is always legal: a batch too close to its end to be stopped, ends. At the very
        instant of a boundary (within `INSTANT_S`) that boundary is the answer.
        """
        if stops is Stops.REQUEST or at_s >= self.total_s - INSTANT_S:
            return self.end
        operators_before = 0
        for start_s, one in zip(self._starts_s, self.passes, strict=True):
            stop = self._stop_in_pass(one, at_s - start_s - INSTANT_S, stops)
            if stop is not None:
                at = start_s + stop.at_s
                if at >= self.total_s - INSTANT_S:
                    return self.end
                return Stop(at, operators_before + stop.operators)
            operators_before += 5 * one.layers
        return self.end

    def at(self, operators: int, stops: Stops) -> float:
        """Seconds from the start to the stop after that many operators (0 for none): what `next_stop` answers."""
        start_s = 0.0
        for one in self.passes:
            count = 5 * one.layers
            if operators <= count and not (stops is Stops.PASS and operators == count):
                layer, operator = divmod(operators - 1, 5)
                return start_s + one.head_s + layer * one.ends_s[4] + one.ends_s[operator] if operators else start_s
            start_s += one.total_s
            operators -= count
        return start_s

    def boundaries(self, stops: Stops) -> list[Stop]:
        """Every legal stop in order, the end of the timeline last."""
        found: list[Stop] = []
        at_s = 0.0
        while not found or found[-1] != self.end:
            found.append(self.next_stop(at_s, stops))
            at_s = found[-1].at_s + 2 * INSTANT_S
        return found

    def mean_wait_s(self, stops: Stops, passed: int = 0) -> float:
        """Mean seconds from a random moment to the next legal stop, or to the one after `passed` more.

        Of a moment within the layers; the heads and tails of passes, which nothing can stop, are left out. What stops
        at the end of a pass or of the whole waits for half of it.
        """
        if not stops.operators:
            if stops is Stops.REQUEST:
                return 0.5 * self.total_s
            return 0.5 * sum(one.total_s * one.total_s for one in self.passes) / self.total_s
        waits_s = layers_s = 0.0
        for one in self.passes:
            layer_s = one.layers * one.ends_s[4]
            waits_s += layer_s * _mean_wait_s([one.ends_s[operator] for operator in stops.operators], passed)
            layers_s += layer_s
        return waits_s / layers_s

    @staticmethod
    def _stop_in_pass(one: Pass, at_s: float, stops: Stops) -> Stop | None:
        """The first legal stop of one pass at or after `at_s`, relative to the pass; None where none is left."""
        if stops is Stops.PASS:
            total_s = one.total_s
            return Stop(total_s, 5 * one.layers) if at_s <= total_s else None
        inside_s = at_s - one.head_s
        layer_s = one.ends_s[4]
        layer = int(inside_s / layer_s) if inside_s > 0.0 else 0
        for number in (layer, layer + 1):  # the second turn only where rounding put `at_s` a layer early
            if number >= one.layers:
                return None
            begin_s = number * layer_s
            for operator in stops.operators:
                if begin_s + one.ends_s[operator] >= inside_s:
                    return Stop(one.head_s + begin_s + one.ends_s[operator], 5 * number + operator + 1)
        raise AssertionError(f"no stop after {at_s} s in {one}")


def _mean_wait_s(ends_s: list[float], passed: int) -> float:
    """Mean seconds to the stop after `passed` more, where a stretch that repeats has stops at `ends_s`, the last one
    being its length."""
    gaps_s = [end_s - before_s for before_s, end_s in pairwise([0.0, *ends_s])]
    waits_s = 0.0
    for place, gap_s in enumerate(gaps_s):
        wait_s = 0.5 * gap_s
        for later in range(place + 1, place + 1 + passed):
            wait_s += gaps_s[later % len(gaps_s)]
        waits_s += gap_s * wait_s
    return waits_s / ends_s[-1]


class Iterations:
    """Decode steps back to back; step i takes `first_s + i * growth_s`, as each step adds a token to every context.

    It answers what a Timeline does, each step being a pass that ends with `operators` more operators; whatever
    the legal stops are, nothing stops within a step.
    """

    __slots__ = ("count", "end", "first_s", "growth_s", "operators", "total_s")

    def __init__(self, first_s: float, growth_s: float, count: int, operators: int) -> None:
        self.first_s = first_s
        self.growth_s = growth_s
        self.count = count
        self.operators = operators
        self.total_s = self.end_s(count)
        self.end = Stop(self.total_s, count * operators)

    def end_s(self, steps: int) -> float:
        """Seconds from the start to the end of that many steps."""
        return steps * (self.first_s + 0.5 * (steps - 1) * self.growth_s)

    def next_stop(self, at_s: float, stops: Stops) -> Stop:
        """The end of the first step that ends at or after `at_s` seconds from the start."""
        if stops is Stops.REQUEST or at_s >= self.total_s - INSTANT_S:
            return self.end
        at_s = max(0.0, at_s - INSTANT_S)
        steps = 1
        if at_s > self.first_s:
            linear = self.first_s - 0.5 * self.growth_s
            root = math.sqrt(linear * linear + 2.0 * self.growth_s * at_s)
            steps = max(1, math.floor(2.0 * at_s / (linear + root)))
        while self.end_s(steps) < at_s:
            steps += 1
        return self.end if steps >= self.count else Stop(self.end_s(steps), steps * self.operators)

    def at(self, operators: int, stops: Stops) -> float:
        """Seconds from the start to the stop after that many operators."""
        return self.end_s(operators // self.operators)

    def boundaries(self, stops: Stops) -> list[Stop]:
        """Every legal stop in order, the end last."""
        if stops is Stops.REQUEST:
            return [self.end]
        steps = [Stop(self.end_s(step), step * self.operators) for step in range(1, self.count)]
        return [*steps, self.end]
