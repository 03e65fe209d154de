"""How figures look: one style, and a look of its own for each policy or class. matplotlib is imported only when used.

The style lies in `paper.mplstyle`: small type, embedded fonts, and colours beside lines, markers and hatches, so that
a figure keeps its meaning in grey. In a notebook ``plt.style.use("flowsim.report.paper")`` draws your own in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, ParamSpec

from flowsim.names import unknown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS", "COLUMN_IN", "FORMATS", "LINES", "PAGE_IN", "Look", "drawn", "figure_of", "label", "legend_above",
    "looks", "plain", "plain_decades", "save", "style",
]  # fmt: skip

COLUMN_IN = 3.35  # the width in inches of one column of two
PAGE_IN = 7.0  # and of both
FORMATS = ("png", "pdf", "svg")

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")  # Okabe-Ito
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (7, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---", "++")
# Policies that are often compared look the same in every figure, whichever of them it shows.
PLACES = {"flowprefill": 0, "chunked_2k": 1, "chunked_8k": 2, "fcfs": 3, "layer_sedf": 4, "edf": 5, "shortest": 6}

LABELS = {
    "attainment": "SLO attainment",
    "goodput_rps": "goodput [requests/s]",
    "bound_rps": "any schedule, at most",
    "bound_alone_rps": "any without batching, at most",
    "bound_scale": "any schedule, at least",
    "bound_alone_scale": "any without batching, at least",
    "rate_rps": "rate [requests/s]",
    "offered_load": "offered load",
    "slo_scale": "SLO scale",
    "tp": "TP degree",
    "cv": "CV of the gaps between arrivals",
    "ttft_s": "TTFT [s]",
    "blocking_s": "blocking time [s]",
    "stops": "stops at",
}
UNITS = {
    "_tokens_per_s": "tokens/s",
    "_per_s": "1/s",
    "_s": "s",
    "_ms": "ms",
    "_tokens": "tokens",
    "_rps": "requests/s",
    "_bytes": "bytes",
    "_blocks": "blocks",
}  # the first that a name ends with

P = ParamSpec("P")


def style() -> AbstractContextManager[None]:
    """The style for what is drawn or saved inside a `with` block."""
    import matplotlib as mpl

    return mpl.rc_context(fname=Path(__file__).with_name("paper.mplstyle"))


def drawn(figure: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draws a figure's function in the style, wherever it is called."""

    @wraps(figure)
    def in_style(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with style():
            return figure(*args, **kwargs)

    return in_style


def save(figure: Figure, path: str | Path) -> Path:
    """Writes a figure as its ending says: pdf and svg as vectors with fonts embedded, png at 200 dots per inch.

    Raises:
        ValueError: another ending.
    """
    path = Path(path)
    if path.suffix[1:] not in FORMATS:
        raise ValueError(f"{path}: " + unknown("format of a figure", path.suffix[1:], FORMATS))
    # no date in the file: the same figure gives the same bytes
    stamps = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {"Software": None}}
    path.parent.mkdir(parents=True, exist_ok=True)
    with style():
        figure.savefig(path, metadata=stamps[path.suffix[1:]])
    return path


@dataclass(frozen=True, slots=True)
class Look:
    """How one policy, class or other series is told from the others, in colour and in grey."""

    colour: str
    line: Any
    marker: str
    hatch: str


def looks(names: Iterable[Any]) -> dict[Any, Look]:
    """A look for each name: that of a policy often compared is always the same, others take what is left in order."""
    given = list(dict.fromkeys(names))
    places = {name: PLACES[name] for name in given if name in PLACES}
    free = (place for place in range(len(given) + len(PLACES)) if place not in places.values())
    return {name: _look(places[name] if name in places else next(free)) for name in given}


def _look(place: int) -> Look:
    """The seven of a kind go round at different speeds once they are used up, so that pairs stay apart."""
    turn = place // len(COLOURS)
    kinds = (COLOURS, LINES, MARKERS, HATCHES)
    return Look(*(kind[(place + turn * speed) % len(kind)] for speed, kind in enumerate(kinds)))


def figure_of(width_in: float, aspect: float, title: str = "") -> Figure:
    """An empty figure of a width in inches, `aspect` times as high."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, width_in * aspect), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=8)
    return figure


def legend_above(figure: Figure, title: str = "") -> None:
    """The legend of the first axes in rows above all of them, under the title; the figure grows by its height.

    A name or a title wider than the figure goes on in the next line.
    """
    handles, given = figure.axes[0].get_legend_handles_labels()
    if not given:
        return
    letters = int(figure.get_figwidth() * 13)  # of small type in a line
    names = ["\n".join(fill(line, letters - 3) for line in name.split("\n")) for name in given]
    title = fill(title, letters)
    widest = max(len(line) for name in names for line in name.split("\n"))
    room = max(1, int(figure.get_figwidth() * 15 / (widest + 8)))
    rows = ceil(len(names) / room)
    lines_high = rows * max(name.count("\n") + 1 for name in names) + len(title.splitlines())
    figure.set_figheight(figure.get_figheight() + 0.15 * lines_high)
    figure.legend(
        handles, names, loc="outside upper center", ncols=ceil(len(names) / rows), columnspacing=1.2,
        title=title or None, title_fontsize=8,
    )  # fmt: skip


def plain_decades(axes: Axes) -> None:
    """Plain numbers at the decades of a logarithmic x axis, and nothing between them."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def label(column: str) -> str:
    """A column's name as an axis shows it, with its unit: `token_budget_tokens` becomes `token budget [tokens]`."""
    column = column.removeprefix("workload.")
    if column in LABELS:
        return LABELS[column]
    for ending, unit in UNITS.items():
        if column.endswith(ending):
            return f"{column.removesuffix(ending).replace('_', ' ')} [{unit}]"
    return plain(column.replace("_", " "))


def plain(name: str) -> str:
    """A name as matplotlib shows it letter by letter: no formula, and not hidden for a leading underscore."""
    return " " * name.startswith("_") + name.replace("$", r"\$")
