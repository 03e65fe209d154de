"""What the terminal shows: progress on stderr while a run takes its time, a table on stdout at its end."""

from __future__ import annotations

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

from flowsim.metrics import Result

__all__ = ["RunProgress", "class_table"]

PATIENCE_S = 2.0  # a run that ends sooner shows no progress


class RunProgress:
    """Shows how many requests have ended, and when the rest will have, once a run takes over two seconds."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began_s = perf_counter()
        self._bar: Progress | None = None

    def __call__(self, ended: int) -> None:
        if self._bar is None:
            if perf_counter() - self._began_s < PATIENCE_S:
                return
            self._bar = Progress(
                TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"),
                TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(),
                console=Console(stderr=True),
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        self._bar.update(self._task, completed=ended)

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            if kind is None:
                self._bar.update(self._task, completed=self._total)
            self._bar.stop()


def class_table(result: Result, title: str) -> Table:
    """Attainment and TTFT by class, all requests last."""
    figures = result.summary()
    requests = result.tables["requests"]
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("class", no_wrap=True)
    for name in ("requests", "SLO s", "attained", "TTFT s: mean", "p50", "p90", "p99", "paused"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, ttft_s in figures["ttft_s_by_class"].items():
        rows = requests["slo_class"] == name
        slos_s = sorted(set(requests["ttft_slo_s"][rows].tolist()))
        slo = (
            "none" if slos_s == [float("inf")] else " to ".join(f"{slo_s:g}" for slo_s in {slos_s[0]: 0, slos_s[-1]: 0})
        )
        paused = int((requests["suspended_s"][rows] > 0.0).sum())
        attained = _share(figures["attainment_by_class"][name])
        table.add_row(name, str(int(rows.sum())), slo, attained, *map(_seconds, ttft_s.values()), str(paused))
    table.add_section()
    paused = int((requests["suspended_s"] > 0.0).sum())
    attained = _share(figures["attainment"])
    table.add_row(
        "all",
        str(figures["requests"]),
        "",
        attained,
        *map(_seconds, figures["ttft_s"].values()),
        str(paused),
    )
    return table


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"
