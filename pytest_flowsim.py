"""The pytest plugin: `pytest --flowsim-baseline FILE` runs a baseline's suite, a test for each policy and workload.

pytest loads it at every start, so it imports nothing of flowsim before a baseline is asked for; that is also why it
lies beside the package.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from flowsim.regress import Baseline, Move

OPTION = "--flowsim-baseline"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option."""
    parser.getgroup("flowsim").addoption(
        OPTION,
        action="append",
        default=[],
        metavar="FILE",
        help="gate on a baseline of flowsim's policy metrics; may be given several times",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Collects the files that are named, as if they had been given as arguments too."""
    for path in _asked(config):
        if not path.is_file():
            raise pytest.UsageError(f"{OPTION}: {path} is not a file; docs/regress.md of flowsim shows one")
        if str(path) not in config.args:
            config.args.append(str(path))


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> BaselineFile | None:
    """A baseline is a file of tests."""
    if file_path not in _asked(parent.config):
        return None
    return BaselineFile.from_parent(parent, path=file_path)


def _asked(config: pytest.Config) -> list[Path]:
    return [(config.invocation_params.dir / given).resolve() for given in config.getoption(OPTION)]


class BaselineFile(pytest.File):
    """A baseline, with an item for each cell of its suite."""

    def collect(self) -> Iterable[Cell]:
        from flowsim.regress import load

        try:
            baseline = load(self.path)
        except ValueError as error:
            raise self.CollectError(str(error)) from error
        for policy, workload in baseline.suite.cells:
            name = f"{policy} on {workload}"
            yield Cell.from_parent(self, name=name, baseline=baseline, cell=(policy, workload))


class Cell(pytest.Item):
    """A policy on a workload, at every seed of the suite."""

    def __init__(self, *, baseline: Baseline, cell: tuple[str, str], **given: Any) -> None:
        super().__init__(**given)
        self.baseline = baseline
        self.cell = cell

    def runtest(self) -> None:
        """Measures, compares; what moved for the better is told in a section of the report."""
        from flowsim.regress import compare, measure

        now = measure(self.baseline.suite, self.cell)
        moves = compare(self.cell, self.baseline.of(self.cell), now, self.baseline.tolerances)
        if any(move.verdict.fails for move in moves):
            raise MovedError(moves)
        if moves:
            self.add_report_section("call", "flowsim", _as_text(moves))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The table of what moved; any other error as it is, without pytest's own frames."""
        if not isinstance(excinfo.value, MovedError):
            return super().repr_failure(excinfo, "short")
        update = f"python -m flowsim.regress --baseline {self.path} --update --reason '...'"
        return f"{_as_text(excinfo.value.moves)}\nIf this is meant: {update}"

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


class MovedError(Exception):
    """Figures of a cell are not what the baseline says."""

    def __init__(self, moves: list[Move]) -> None:
        super().__init__(f"{len(moves)} figures moved")
        self.moves = moves


def _as_text(moves: list[Move]) -> str:
    from flowsim.regress.show import as_text

    return as_text(moves)
