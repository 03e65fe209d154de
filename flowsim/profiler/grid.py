"""What is measured, and in which order: coarse first, so that a run that stops early leaves a usable grid.

Pure: knows operators by name, no torch, no device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["GRIDS", "Grid", "Point", "points"]

PER_SEQUENCE = ("lm_head", "sampler")  # one row of hidden states a sequence, whatever its length
FIRST = 8  # points of an operator that a fit needs
PER_CONTEXT = ("attention", "whole_layer")  # depend on the cached tokens and on the sequences' lengths


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """One call: `batch` sequences of `new_tokens` each on `cached_tokens` each; `sequences` for lm_head and sampler."""

    operator: str
    new_tokens: int
    cached_tokens: int = 0
    batch: int = 1
    sequences: int = 0

    @property
    def tokens(self) -> int:
        """New tokens of all sequences together."""
        return self.new_tokens * self.batch

    def columns(self) -> dict[str, str | int]:
        """The point as columns of the operator trace."""
        return {
            "operator": self.operator,
            "new_tokens": self.new_tokens,
            "cached_tokens": self.cached_tokens,
            "batch": self.batch,
            "sequences": self.sequences,
        }

    @classmethod
    def of(cls, row: Mapping[Any, Any]) -> Point:
        """The point of a row of the operator trace."""
        counts = (int(row[name]) for name in ("new_tokens", "cached_tokens", "batch", "sequences"))
        return cls(str(row["operator"]), *counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Token counts of the token-wise operators; new and cached tokens and batches of attention; sequences."""

    tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    cached_tokens: tuple[int, ...]
    batch: tuple[int, ...]
    sequences: tuple[int, ...]

    def upto(self, max_tokens: int) -> Grid:
        """The part of the grid within so many tokens of a pass and of a context."""
        cut = {name: tuple(n for n in getattr(self, name) if n <= max_tokens) for name in ("tokens", "new_tokens")}
        if len(cut["tokens"]) < 8:
            raise ValueError(f"--max-tokens {max_tokens} leaves {len(cut['tokens'])} token counts; a fit needs 8")
        cached = tuple(n for n in self.cached_tokens if n < max_tokens)
        return Grid(**cut, cached_tokens=cached, batch=self.batch, sequences=self.sequences)


GRIDS = {
    "full": Grid(
        tokens=(1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384),
        new_tokens=(1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
        cached_tokens=(0, 512, 2048, 8192, 16384),
        batch=(1, 4, 16),
        sequences=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    ),
    "small": Grid(
        tokens=(1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512),
        new_tokens=(1, 16, 32, 64, 96, 128, 192, 256, 512),
        cached_tokens=(0, 64, 256),
        batch=(1, 4),
        sequences=(1, 2, 4, 8, 12, 16, 24, 32),
    ),
}


def points(operators: Sequence[str], grid: Grid, max_tokens: int) -> list[Point]:
    """All points, interleaved over the operators, each operator's coarse ones first.

    The first 8 points of every operator, with which it can be fitted, come before all others; from there on a
    prefix of the list covers all ranges about evenly. Attention and the whole layer keep to `max_tokens` of new
    tokens in a pass and of context in a sequence; they begin with single prompts without cached tokens.
    """
    chains = [_chain(_of_operator(name, grid, max_tokens)) for name in operators]
    placed = [
        (place >= FIRST, place if place < FIRST else (place + 0.5) / len(chain), number, point)
        for number, chain in enumerate(chains)
        for place, point in enumerate(chain)
    ]
    return [point for _, _, _, point in sorted(placed)]


def _of_operator(name: str, grid: Grid, max_tokens: int) -> list[Point]:
    if name in PER_SEQUENCE:
        return [Point(name, 0, sequences=count) for count in grid.sequences]
    if name not in PER_CONTEXT:
        return [Point(name, count) for count in grid.tokens]
    return [
        Point(name, new, cached, batch)
        for new in grid.new_tokens
        for cached in grid.cached_tokens
        for batch in grid.batch
        if new * batch <= max_tokens and new + cached <= max_tokens and (cached + new) * batch <= 4 * max_tokens
    ]


def _chain(found: list[Point]) -> list[Point]:
    """One operator's points: plain prompts, then those with cached tokens, then batches."""
    parts: tuple[list[Point], ...] = ([], [], [])
    for point in found:
        parts[2 if point.batch > 1 else int(point.cached_tokens > 0)].append(point)
    return [point for part in parts for point in _coarse_first(part)]


def _coarse_first(found: list[Point]) -> list[Point]:
    """The largest, then the smallest, then always the point farthest from all before it, on logarithmic axes."""
    where = {point: _place(point) for point in found}
    left = sorted(found, key=lambda point: (point.batch, point.tokens + point.cached_tokens + point.sequences))
    if not left:
        return []
    ordered = [left.pop()]
    distance = {point: math.dist(where[point], where[ordered[0]]) for point in left}
    while left:
        farthest = max(left, key=lambda point: distance[point])
        ordered.append(farthest)
        left.remove(farthest)
        for point in left:
            distance[point] = min(distance[point], math.dist(where[point], where[farthest]))
    return ordered


def _place(point: Point) -> tuple[float, float, float]:
    """Its coordinates; new tokens weigh twice, as every law of the fit has them."""
    axes = (point.new_tokens + point.sequences, point.cached_tokens / 16, point.batch)
    new, cached, batch = (math.log1p(value) for value in axes)
    return 2 * new, cached, batch
