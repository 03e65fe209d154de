"""Cells of a study: the configurations of a grid, each with its labels, and the points that they are run as."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowsim.names import unknown
from flowsim.study.points import Figures, Measure, Point, Work, columns
from flowsim.variants import OBJECTS, is_key, known_choices, variant

__all__ = ["Cell", "Grid", "cells_of", "checked_seeds"]

Axis = Iterable[Any] | Mapping[str, Any]
Grid = Mapping[str, Axis] | Sequence[Mapping[str, Any]]
"""What varies: an axis of values for each key, crossed; or the cells themselves, each a mapping of key to value."""


@dataclass(frozen=True)
class Cell:
    """One configuration of a grid: `overrides` as on the command line, then `values` set key by key, and `objects`
    in place of groups. `labels` name it in every table; `measure` and `work` are as in `Point`."""

    labels: Mapping[str, Any]
    overrides: tuple[str, ...]
    values: Mapping[str, Any]
    objects: Mapping[str, Any]
    config_dir: str | Path | None = None
    measure: Measure | None = None
    work: Work | None = None

    def at(self, values: Mapping[str, Any]) -> Cell:
        """The same cell with other values."""
        return replace(self, values={**self.values, **values})

    def point(self, place: int, seed: int) -> tuple[Point, Figures]:
        """It as a point with a seed, and the columns that its settings are in every table."""
        values = {**self.values, "seed": seed}
        _check_taken(self.objects.get("workload"), values)
        settings, choices = variant(self.overrides, values, objects=self.objects, config_dir=self.config_dir)
        for group, thing in self.objects.items():
            if group == "latency":
                settings |= {"model": thing.profile.model, "gpu": thing.profile.gpu, "tp": thing.tp}
            else:
                settings[group] = _taken(thing, settings["workload"]) if group == "workload" else {}
        named = {group: label(thing) for group, thing in self.objects.items()}
        row = {"seed": seed, **named, **choices, **columns(settings)}
        return Point(place, settings, self.objects, self.measure, self.work), {**row, **self.labels}


def cells_of(
    overrides: Sequence[str],
    grid: Grid | None,
    *,
    config_dir: str | Path | None = None,
    measure: Measure | None = None,
) -> list[Cell]:
    """The cells of a grid, in its order; the last axis runs fastest.

    Raises:
        ValueError: an axis without values, with a name that is no key, or with two values of one label.
    """
    if isinstance(overrides, str):
        raise ValueError(f"overrides is the text {overrides!r}; it must be a list, such as ['policy=fcfs', 'tp=2']")
    base = Cell({}, tuple(overrides), {}, {}, config_dir, measure)
    if grid is None:
        return [base]
    if not isinstance(grid, Mapping):
        return _distinct([_changed(base, {name: label(value) for name, value in one.items()}, one) for one in grid])
    axes = [_axis(name, values) for name, values in grid.items()]
    found = []
    for chosen in itertools.product(*axes):
        cell = base
        for labels, changes in chosen:
            cell = _changed(cell, labels, changes)
        found.append(cell)
    return _distinct(found)


def checked_seeds(seeds: Sequence[int]) -> list[int]:
    """Seeds, as a list.

    Raises:
        ValueError: none, one twice, or one that is not a whole number of at least 0.
    """
    if isinstance(seeds, int | str) or not list(seeds):
        raise ValueError(f"seeds is {seeds!r}; it must be a list of at least one seed, such as [0, 1, 2]")
    found = [int(seed) if not isinstance(seed, bool | float | str) else -1 for seed in seeds]
    if min(found) < 0 or len(set(found)) < len(found):
        raise ValueError(f"seeds is {list(seeds)!r}; they must be different whole numbers of at least 0")
    return found


def label(value: Any) -> Any:
    """What names a value in a table: itself, or its name, or its text."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping | list | tuple):
        try:
            return json.dumps(value)
        except TypeError:
            return type(value).__name__
    return str(getattr(value, "__name__", type(value).__name__))


def _axis(name: str, values: Axis) -> list[tuple[dict[str, Any], Any]]:
    """(labels, changes) of each value of an axis."""
    if not is_key(name) and not isinstance(values, Mapping):
        raise ValueError(
            f"{unknown('key', name, known_choices())}; or an axis of your own, a mapping of label to overrides: "
            f"{{{name!r}: {{'small': ['policy.batching.tokens=512'], 'large': {{'policy.batching.tokens': 4096}}}}}}"
        )
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name} is {values!r}; it must be a list of values, or a mapping of label to value")
    items = values.items() if isinstance(values, Mapping) else [(label(value), value) for value in values]
    if not items:
        raise ValueError(f"{name} has no values")
    return [({name: text}, {name: value} if is_key(name) else value) for text, value in items]


def _changed(cell: Cell, labels: Mapping[str, Any], changes: Any) -> Cell:
    """A cell after changes: a mapping of key to value or object, or overrides as on the command line."""
    if isinstance(changes, str):
        changes = [changes]
    if not isinstance(changes, Mapping):
        return replace(cell, labels={**cell.labels, **labels}, overrides=(*cell.overrides, *changes))
    objects, values = dict(cell.objects), dict(cell.values)
    for key, value in changes.items():
        if not is_key(key):
            raise ValueError(unknown("key", key, known_choices()))
        if key in OBJECTS and not isinstance(value, str | Mapping):
            objects[key] = value
        else:
            objects.pop(key, None)
            values[key] = value.item() if hasattr(value, "item") else value
    return replace(cell, labels={**cell.labels, **labels}, values=values, objects=objects)


def _distinct(cells: list[Cell]) -> list[Cell]:
    seen: set[str] = set()
    for cell in cells:
        text = repr(dict(cell.labels))
        if text in seen:
            raise ValueError(f"two cells are called {text}; give values a label each: {{'a': ..., 'b': ...}}")
        seen.add(text)
    return cells


def _taken(workload: Any, settings: Mapping[str, Any]) -> Figures:
    """The settings that a workload of the user's own takes."""
    if not callable(workload):
        return {}
    parameters = inspect.signature(workload).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {name: value for name, value in settings.items() if takes_any or name in parameters}


def _check_taken(workload: Any, values: Mapping[str, Any]) -> None:
    """Refuses to vary what a workload of the user's own does not take."""
    if workload is None:
        return
    varied = [key.partition(".")[2] for key in values if key.startswith("workload.")]
    if varied and not callable(workload):
        raise ValueError(
            f"workload.{varied[0]} cannot be varied of a fixed list of requests; give a function that takes {varied[0]}"
        )
    if callable(workload):
        parameters = inspect.signature(workload).parameters
        if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            for name in varied:
                if name not in parameters:
                    raise ValueError(unknown("key", f"workload.{name}", [f"workload.{one}" for one in parameters]))
