"""What the terminal shows: progress on stderr while a run takes its time, a table on stdout at its end; and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from types import TracebackType

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from flowsim.log import Columns
from flowsim.metrics import Result

__all__ = ["RunProgress", "StudyProgress", "class_table", "interruptible"]

PATIENCE_S = 2.0  # a run that ends sooner shows no progress


class RunProgress:
    """Shows how many requests have ended, at what rate, and when the rest will have, and the simulated time: once a
    run takes over two seconds."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began_s = perf_counter()
        self._bar: Progress | None = None

    def __call__(self, ended: int, now_s: float) -> None:
        if self._bar is None:
            if perf_counter() - self._began_s < PATIENCE_S:
                return
            self._bar = Progress(
                TextColumn("t = {task.fields[now_s]:.1f} s"), BarColumn(), MofNCompleteColumn(),
                TextColumn("requests, {task.fields[rate]:,.0f}/s"), TimeElapsedColumn(),
                TextColumn("ETA"), TimeRemainingColumn(),
                console=Console(stderr=True),
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, now_s=0.0, rate=0.0)
        rate = ended / (perf_counter() - self._began_s)
        self._bar.update(self._task, completed=ended, now_s=now_s, rate=rate)

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


class StudyProgress:
    """Shows how many runs of a study have ended, of about how many, and when the rest will have: once it takes over
    two seconds."""

    def __init__(self) -> None:
        self._began_s = perf_counter()
        self._bar: Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            if perf_counter() - self._began_s < PATIENCE_S:
                return
            self._bar = Progress(
                TextColumn("studying"), BarColumn(), MofNCompleteColumn(), TextColumn("runs"), TimeElapsedColumn(),
                TextColumn("ETA"), TimeRemainingColumn(),
                console=Console(stderr=True),
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=done, total=total)

    def __enter__(self) -> StudyProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Gives a function that answers whether Ctrl-C was pressed meanwhile; pressed again, it interrupts as usual.

    Outside the main thread, or where Ctrl-C is handled otherwise, the answer is always False.
    """
    pressed = threading.Event()

    def press(_number: int, _frame: object) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pressed.is_set
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def class_table(result: Result, title: str) -> Table:
    """Attainment and TTFT by class, all requests last; of the requests that are measured."""
    figures = result.summary()
    everyone = result.tables["requests"]
    requests = {name: cells[everyone["measured"]] for name, cells in everyone.items()}
    rows = []
    for name, ttft_s in figures["ttft_s_by_class"].items():
        chosen = requests["slo_class"] == name
        attained = figures["attainment_by_class"][name]
        rows.append([name, *_cells(requests, chosen, _slos(requests["ttft_slo_s"][chosen]), attained, ttft_s)])
    every = np.ones(len(requests["id"]), dtype=bool)
    rows.append(["all", *_cells(requests, every, "", figures["attainment"], figures["ttft_s"])])
    table = Table(
        title=Text(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=0, pad_edge=False
    )
    table.add_column("class", no_wrap=True)  # the one that gives way where the terminal is narrow
    names = ("requests", "SLO s", "attained", "TTFT mean", "p50", "p90", "p99 s", "paused")
    for place, name in enumerate(names, start=1):
        width = max(len(name), *(len(row[place]) for row in rows))
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    for row in rows[:-1]:
        table.add_row(*map(Text, row))
    table.add_section()
    table.add_row(*map(Text, rows[-1]))
    return table


def _cells(
    requests: Columns, rows: npt.NDArray[np.bool_], slo: str, attained: float | None, ttft_s: Mapping[str, float | None]
) -> list[str]:
    """A row of the table behind its name."""
    paused = int((requests["suspended_s"][rows] > 0.0).sum())
    share = "-" if attained is None else f"{attained:.2%}"
    times_s = ["-" if seconds is None else f"{seconds:.3f}" for seconds in ttft_s.values()]
    return [str(int(rows.sum())), slo, share, *times_s, str(paused)]


def _slos(slos_s: npt.NDArray[np.float64]) -> str:
    """The SLO of a class, or the range of its requests' SLOs."""
    finite_s = sorted(set(slos_s[np.isfinite(slos_s)].tolist()))
    if not finite_s:
        return "none"
    ends_s = finite_s[:1] if len(finite_s) == 1 else [finite_s[0], finite_s[-1]]
    return "-".join(f"{slo_s:.2g}" if len(ends_s) > 1 else f"{slo_s:.3g}" for slo_s in ends_s)
