"""What the terminal shows: progress on stderr while a run takes its time, a table on stdout at its end; and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from types import TracebackType

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

from flowsim import by_class
from flowsim.metrics import Result

__all__ = ["RunProgress", "StudyProgress", "class_table", "header", "interruptible"]

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


def header(title: str, requests: int, load: float | None, capacity: str = "capacity") -> Text:
    """What is about to run: how many requests, and the load that they offer as a share of a capacity."""
    text = Text(title, style="bold")
    text.append(f"\n{requests} requests", style="not bold")
    if load is None:
        return text
    text.append(f", offered load {load:.2f} of {capacity}", style="not bold")
    if load > 1.0:
        text.append(
            "\nwarning: more arrives than the GPUs can serve, so queues grow while it does",
            style="not bold yellow",
        )
    return text


def class_table(result: Result, title: str) -> Table:
    """Attainment, TTFT and TBT by class, all requests last; of the requests that are measured."""
    figures = result.summary()
    header, rows = by_class.class_table(figures)
    shares = [*figures["attainment_by_class"].values(), figures["attainment"]]
    table = Table(
        title=Text(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=0, pad_edge=False
    )
    table.add_column(header[0], overflow="fold", min_width=5)  # the one that gives way where the terminal is narrow
    for place, name in enumerate(header[1:], start=1):
        width = max(len(name), *(len(row[place]) for row in rows))
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    for number, (row, share) in enumerate(zip(rows, shares, strict=True), start=1):
        if number == len(rows):
            table.add_section()
        cells = [Text(cell) for cell in row]
        cells[by_class.ATTAINED].stylize(_grade(share))
        table.add_row(*cells)
    return table


def _grade(share: float | None) -> str:
    """The colour of an attainment: by what goodput is usually quoted at, 90 %, and 99 %."""
    if share is None:
        return ""
    return "green" if share >= 0.99 else "yellow" if share >= 0.9 else "red"
