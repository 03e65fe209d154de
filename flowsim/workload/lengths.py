"""How long prompts are: quantile tables, and the files that hold one table per class.

This module must not know arrivals, SLOs or any trace format.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import ArrayLike, NDArray

__all__ = ["LengthClass", "QuantileTable", "load_quantiles"]

TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantileTable:
    """A distribution of token counts, given by quantiles and straight lines between them.

    `levels` rise strictly from 0 (the minimum) to 1 (the maximum); `tokens` are the values there, at least 1
    and never falling. `name` is what errors call the table.

    Raises:
        ValueError: levels or tokens break these rules, naming the table.
    """

    levels: tuple[float, ...]
    tokens: tuple[float, ...]
    name: str = "quantile table"

    def __post_init__(self) -> None:
        levels, tokens = self.levels, self.tokens
        if len(levels) != len(tokens) or len(levels) < 2:
            raise ValueError(
                f"{self.name}: {len(levels)} levels and {len(tokens)} token values; "
                "there must be as many of one as of the other, and at least 2"
            )
        if levels[0] != 0.0 or levels[-1] != 1.0:
            raise ValueError(f"{self.name}: levels run from {levels[0]} to {levels[-1]}; they must run from 0 to 1")
        for before, level in itertools.pairwise(levels):
            if not before < level:
                raise ValueError(f"{self.name}: level {level} follows {before}; levels must rise strictly")
        for value in tokens:
            if not 1.0 <= value < math.inf:
                raise ValueError(f"{self.name}: {value} tokens; values must be finite and at least 1")
        for smaller, value in itertools.pairwise(tokens):
            if value < smaller:
                raise ValueError(f"{self.name}: {value} tokens follow {smaller}; values must never fall")

    def quantile(self, q: ArrayLike) -> NDArray[np.float64]:
        """Tokens at the levels `q`, each within 0..1, not rounded; the shape of `q` is kept.

        Raises:
            ValueError: a level outside 0..1 or NaN.
        """
        level = np.asarray(q, dtype=np.float64)
        outside = ~((level >= 0.0) & (level <= 1.0))
        if outside.any():
            raise ValueError(f"{self.name}: level {level[outside].flat[0]}; levels are within 0..1")
        return np.asarray(np.interp(level, self.levels, self.tokens), dtype=np.float64)

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """`n` independent draws, each rounded to whole tokens; one uniform number is used per draw."""
        return np.rint(self.quantile(rng.random(n))).astype(np.int64)

    def mean(self) -> float:
        """The mean in tokens, exact for the straight lines (before rounding)."""
        width, low, high = self._pieces()
        return float(np.sum(width * (low + high) / 2))

    def std(self) -> float:
        """The standard deviation in tokens, exact for the straight lines (before rounding)."""
        width, low, high = self._pieces()
        low, high = low - self.mean(), high - self.mean()
        return math.sqrt(float(np.sum(width * (low * low + low * high + high * high) / 3)))

    def _pieces(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        tokens = np.array(self.tokens, dtype=np.float64)
        return np.diff(np.array(self.levels, dtype=np.float64)), tokens[:-1], tokens[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthClass:
    """One class of a table file: its share of the requests, the measured requests behind it, its prompts and, where
    the source has them, its outputs."""

    share: float
    points: int
    prompt_tokens: QuantileTable
    output_tokens: QuantileTable | None = None


def load_quantiles(path_or_name: str | Path) -> dict[str, LengthClass]:
    """The classes of a quantile file, in the file's order.

    `path_or_name` is the name of a shipped table (`qwentrace`) or the path of a YAML file of the same form:
    `classes: {CLASS: {share, points, quantiles: [[level, tokens], ...]}}`, shares summing to 1; a class may have
    `output_quantiles` of the same form.

    Raises:
        ValueError: no such table or file, or a content that breaks these rules, naming file and class.
    """
    path = _find(path_or_name)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read as YAML: {error}") from error
    classes = content.get("classes") if isinstance(content, Mapping) else None
    if not isinstance(classes, Mapping) or not classes:
        raise ValueError(f"{path}: no classes; the file needs `classes`, a mapping of at least one class")
    read = {str(name): _length_class(f"{path}: class {name}", entry) for name, entry in classes.items()}
    total = sum(entry.share for entry in read.values())
    if abs(total - 1.0) > 1e-6:
        raise ValueError(f"{path}: the shares of {', '.join(read)} sum to {total:.6g}; they must sum to 1")
    return read


def _find(path_or_name: str | Path) -> Path:
    path = Path(path_or_name)
    if path.suffix in {".yaml", ".yml"}:
        return path
    shipped = TABLES / f"{path_or_name}.yaml"
    if path.name != str(path_or_name) or not shipped.is_file():
        names = ", ".join(sorted(table.stem for table in TABLES.glob("*.yaml")))
        raise ValueError(
            f"no quantile table {str(path_or_name)!r}; shipped are {names}; or give the path of a .yaml file"
        )
    return shipped


def _length_class(where: str, entry: Any) -> LengthClass:
    if not isinstance(entry, Mapping) or not {"share", "points", "quantiles"} <= set(entry):
        raise ValueError(f"{where}: found {entry!r:.60}; it needs share, points and quantiles")
    share, points, pairs = entry["share"], entry["points"], entry["quantiles"]
    if not _is_number(share) or not 0.0 <= share <= 1.0:
        raise ValueError(f"{where}: share is {share!r}; it must be a number within 0..1")
    if not isinstance(points, int) or isinstance(points, bool) or points < 1:
        raise ValueError(f"{where}: points is {points!r}; it must be an integer of at least 1")
    outputs = entry.get("output_quantiles")
    return LengthClass(
        share=float(share),
        points=points,
        prompt_tokens=_table(where, pairs),
        output_tokens=None if outputs is None else _table(f"{where}: output_quantiles", outputs),
    )


def _table(where: str, pairs: Any) -> QuantileTable:
    if not isinstance(pairs, list):
        raise ValueError(f"{where}: quantiles is {pairs!r:.60}; it must be a list of [level, tokens] pairs")
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(map(_is_number, pair)):
            raise ValueError(f"{where}: quantile {pair!r:.60}; it must be a pair of numbers [level, tokens]")
    return QuantileTable(
        levels=tuple(float(level) for level, _ in pairs),
        tokens=tuple(float(tokens) for _, tokens in pairs),
        name=where,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
