"""What a baseline runs: policies x workloads x seeds, each run's figures taken and its laws checked.

Knows configurations and runs; it must not know how a baseline is stored or judged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from flowsim.check import check_result
from flowsim.config import build, compose
from flowsim.core import PolicyError

__all__ = ["Cell", "Figure", "Figures", "Suite", "measure"]

Cell = tuple[str, str]
"""(policy, workload), by the names that the suite gives them."""
Figure = int | float | None
Figures = Mapping[str, Figure]
Choice = Sequence[str] | Mapping[str, Any]
"""Overrides as on the command line, or the configuration of a policy or workload itself, with `_target_`."""

# Real time differs from run to run; events say how the simulator worked, and nothing of the policy.
LEFT_OUT = {"scheduler.wall_s", "scheduler.share", "simulation_wall_s", "events_per_request"}


@dataclass(frozen=True)
class Suite:
    """The runs of a baseline.

    `policies` and `workloads` map a name of the user's to a choice; `overrides` hold for every run; `figures` are
    patterns of the names to compare. Modules that a choice names are looked for in `folder`, which holds the
    baseline, beside `config_dir`, and where the command is given.
    """

    policies: Mapping[str, Choice]
    workloads: Mapping[str, Choice]
    seeds: tuple[int, ...]
    overrides: tuple[str, ...]
    figures: tuple[str, ...]
    config_dir: Path | None
    folder: Path

    @property
    def cells(self) -> list[Cell]:
        return [(policy, workload) for policy in self.policies for workload in self.workloads]


def measure(suite: Suite, cell: Cell) -> list[Figures]:
    """The figures of a policy on a workload, for each seed in order: `summary.json` under dotted names, without
    real time and the simulator's events.

    Raises:
        ValueError: a choice that names what does not exist.
        AssertionError: a law of every run that this one breaks (docs/invariants.md).
        PolicyError: an answer that the contract of `select` forbids.
    """
    _make_importable(suite)
    policy, workload = suite.policies[cell[0]], suite.workloads[cell[1]]
    overrides = [*suite.overrides, *(one for choice in (workload, policy) for one in _overrides(choice))]
    config = compose(overrides, config_dir=suite.config_dir)
    for group, choice in (("policy", policy), ("workload", workload)):
        if isinstance(choice, Mapping):
            config[group] = dict(choice)
    found: list[Figures] = []
    for seed in suite.seeds:
        config.seed = seed
        try:
            result = build(config).run()
            check_result(result)
        except (AssertionError, PolicyError) as error:
            raise type(error)(f"{cell[0]} on {cell[1]}, seed {seed}: {error}") from error
        figures = dict(_flat(result.summary(), ""))
        wanted = [name for name in figures if any(fnmatchcase(name, pattern) for pattern in suite.figures)]
        found.append({name: figures[name] for name in wanted if name not in LEFT_OUT})
    return found


def _flat(node: Any, name: str) -> Iterator[tuple[str, Figure]]:
    if not isinstance(node, Mapping | list):
        yield name, node
        return
    for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
        yield from _flat(value, f"{name}.{key}" if name else str(key))


def _overrides(choice: Choice) -> Sequence[str]:
    return () if isinstance(choice, Mapping) else choice


def _make_importable(suite: Suite) -> None:
    folders = [Path.cwd(), suite.folder] + ([suite.config_dir.parent] if suite.config_dir else [])
    sys.path += [str(folder) for folder in dict.fromkeys(folders) if str(folder) not in sys.path]
