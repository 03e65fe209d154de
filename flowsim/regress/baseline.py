"""The file of a baseline: the suite and its tolerances, written by its user; the record, written by `record`.

Knows the file's form; it runs and judges nothing.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import flowsim
from flowsim.names import unknown
from flowsim.regress.compare import ANYTHING, Tolerance, Tolerances
from flowsim.regress.suite import Cell, Choice, Figures, Suite

__all__ = ["Baseline", "load", "record"]

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
RECORDED = "recorded:"
HEADING = f"{RECORDED} # from here on written by `python -m flowsim.regress --update`; newest update first\n"
SUITE_KEYS = ("policies", "workloads", "seeds", "overrides", "figures", "config_dir")
EXAMPLE = """\
suite:
  policies: [flowprefill, fcfs]
  workloads: {mixed: [workload=mixed, workload.rate_rps=6, workload.num_requests=500]}
  seeds: [0, 1]"""


@dataclass(frozen=True)
class Baseline:
    """A suite, how far its figures may move, and what they were: `recorded[policy, workload][seed]`.

    `updates` are the records' dates and reasons, newest first; `head` is the part of the file that is its user's.
    """

    path: Path
    head: str
    suite: Suite
    tolerances: Tolerances
    recorded: Mapping[Cell, Mapping[int, Figures]]
    updates: Sequence[Mapping[str, str]]

    def of(self, cell: Cell) -> list[Figures | None]:
        """The recorded figures of a cell for each seed of the suite, None where there are none."""
        return [self.recorded.get(cell, {}).get(seed) for seed in self.suite.seeds]


def load(path: str | Path) -> Baseline:
    """Reads a baseline.

    Raises:
        ValueError: no such file (the error shows a suite to begin with), or one that cannot be read, with the key.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file. A baseline begins with a suite, for example:\n{EXAMPLE}")
    text = path.read_text(encoding="utf-8")
    try:
        document = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {error}") from error
    try:
        return _read(path, text, document)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _read(path: Path, text: str, document: Any) -> Baseline:
    _check_keys(document, "", ("suite", "tolerances", "recorded"))
    if "recorded" in document and list(document)[-1] != "recorded":
        raise ValueError("`recorded` must be the last key: what follows it is written anew at each update")
    recorded = document.get("recorded") or {}
    figures = {
        (policy, workload): {
            seed: {name: values[place] for name, values in by_name.items() if values[place] != ABSENT}
            for place, seed in enumerate(recorded["seeds"])
        }
        for policy, by_workload in recorded.get("figures", {}).items()
        for workload, by_name in by_workload.items()
    }
    return Baseline(
        path=path,
        head=_head(text),
        suite=_suite(document.get("suite"), path.absolute().parent),
        tolerances=[(name, _tolerance(name, value)) for name, value in (document.get("tolerances") or {}).items()],
        recorded=figures,
        updates=recorded.get("updates", []),
    )


ABSENT = "absent"  # in the list of a figure that some seeds have and others do not


def record(baseline: Baseline, measured: Mapping[Cell, Sequence[Figures]], reason: str) -> None:
    """Writes the file anew: its user's part as it is, these figures, and why they are the right ones now.

    Args:
        baseline: as loaded.
        measured: for each cell the figures of each seed of the suite, in order.
        reason: goes on record with today's date and the version of flowsim.

    Raises:
        ValueError: an empty reason.
    """
    if not reason.strip():
        raise ValueError("a baseline is updated for a reason: give it with --reason TEXT")
    update = {"date": datetime.date.today().isoformat(), "flowsim": flowsim.__version__, "reason": reason.strip()}
    figures: dict[str, dict[str, Any]] = {}
    for (policy, workload), by_seed in measured.items():
        names = dict.fromkeys(name for one in by_seed for name in one)
        by_name = {name: [_rounded(one.get(name, ABSENT)) for one in by_seed] for name in names}
        figures.setdefault(policy, {})[workload] = by_name
    content = {"updates": [update, *baseline.updates], "seeds": list(baseline.suite.seeds), "figures": figures}
    body = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=10**6, allow_unicode=True)
    indented = "".join(f"  {line}\n" for line in body.splitlines())
    head = baseline.head.rstrip("\n") + "\n\n"
    partial = baseline.path.with_name(baseline.path.name + ".partial")
    partial.write_text(head + HEADING + indented, encoding="utf-8")  # an interrupted update leaves the old file
    os.replace(partial, baseline.path)


def _rounded(figure: Any) -> Any:
    """Ten digits: more than any tolerance asks for."""
    return float(f"{figure:.10g}") if isinstance(figure, float) else figure


def _head(text: str) -> str:
    """The lines before the record."""
    lines = text.splitlines(keepends=True)
    ends = next((place for place, line in enumerate(lines) if line.startswith(RECORDED)), len(lines))
    return "".join(lines[:ends])


def _check_keys(node: Any, where: str, allowed: Sequence[str]) -> None:
    if not isinstance(node, Mapping):
        name = f"`{where}`" if where else "a baseline"
        raise ValueError(f"{name} is {node!r:.60}; it must have keys: {', '.join(allowed)}. For example:\n{EXAMPLE}")
    for key in node:
        if key not in allowed:
            raise ValueError(unknown("key", f"{where}.{key}" if where else key, allowed))


def _suite(node: Any, folder: Path) -> Suite:
    _check_keys(node, "suite", SUITE_KEYS)
    seeds = node.get("seeds", [0])
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ValueError(f"suite.seeds is {seeds!r}; it must be a list of whole numbers of at least 0")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"suite.seeds is {seeds!r}; each may be there once")
    config_dir = node.get("config_dir")
    return Suite(
        policies=_choices(node.get("policies"), "policies", "policy"),
        workloads=_choices(node.get("workloads"), "workloads", "workload"),
        seeds=tuple(seeds),
        overrides=tuple(_overrides(node.get("overrides", []), "suite.overrides")),
        figures=tuple(_patterns(node.get("figures", ["*"]))),
        config_dir=folder / config_dir if config_dir else None,
        folder=folder,
    )


def _choices(node: Any, key: str, group: str) -> dict[str, Choice]:
    """`[fcfs, ...]`, or `{name: [override, ...]}`, or `{name: {_target_: module.Class, ...}}`."""
    if isinstance(node, list) and node and all(isinstance(one, str) for one in node):
        return {name: [f"{group}={name}"] for name in node}
    if not isinstance(node, Mapping) or not node:
        raise ValueError(f"suite.{key} is {node!r:.60}; it must be a list of names, or names with their overrides")
    return {
        str(name): dict(one)
        if isinstance(one, Mapping) and "_target_" in one
        else _overrides(one, f"suite.{key}.{name}")
        for name, one in node.items()
    }


def _patterns(node: Any) -> list[str]:
    if not isinstance(node, list) or not node or not all(isinstance(one, str) for one in node):
        raise ValueError(f"suite.figures is {node!r:.80}; it must be a list of names or patterns such as ttft_s.*")
    return list(node)


def _overrides(node: Any, where: str) -> list[str]:
    if not isinstance(node, list) or not all(isinstance(one, str) and "=" in one for one in node):
        raise ValueError(f"{where} is {node!r:.80}; it must be a list of overrides such as workload.rate_rps=6")
    return list(node)


def _tolerance(name: str, node: Any) -> Tolerance:
    """`{absolute: x, relative: y}`, `exact` or `ignore`."""
    words = {"exact": Tolerance(), "ignore": ANYTHING}
    if isinstance(node, str) and node in words:
        return words[node]
    sizes = node if isinstance(node, Mapping) else {}
    good = sizes and all(key in ("absolute", "relative") for key in sizes)
    if not good or not all(type(size) in (int, float) and 0.0 <= size < math.inf for size in sizes.values()):
        allowed = "exact, ignore, or {absolute: AMOUNT, relative: SHARE} with numbers of at least 0"
        raise ValueError(f"tolerances.{name} is {node!r}; it must be {allowed}")
    return Tolerance(**{key: float(size) for key, size in sizes.items()})
