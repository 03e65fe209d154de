"""The picture of docs/concepts.md: `python -m experiments.flow_of_a_request` (a second).

Above, what a request passes through; below, one GPU while an urgent request arrives during a long prefill. Times are
not to scale.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowsim.report.style import COLOURS, PAGE_IN, drawn, figure_of, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = Path(__file__).parents[1] / "docs" / "img" / "flow.svg"
LONG, URGENT = COLOURS[2], COLOURS[3]
INK = "0.15"


@drawn
def flow() -> Figure:
    """Both halves of the picture."""
    figure = figure_of(PAGE_IN, 0.62)
    above, below = figure.subplots(2, 1, height_ratios=[4, 3])
    for axes, height in ((above, 48), (below, 34)):
        axes.set(xlim=(-1, 127), ylim=(0, height))
        axes.axis("off")
    _stations(above)
    _gpu(below)
    return figure


def _stations(axes: Axes) -> None:
    _box(axes, 0, 24, 20, 13, "Workload", "requests: arrival,\nprompt tokens, SLO")
    _box(axes, 26, 24, 14, 13, "Router", "picks an\ninstance")
    axes.add_patch(_rounded(44, 3, 64, 44, facecolor="0.96", edgecolor="0.6", linestyle="--"))
    axes.text(46, 43.5, "Instance: one tensor-parallel group", fontsize=7, color="0.35", va="center")
    _box(axes, 47, 24, 15, 13, "Waiting", "in the order\nthe policy asks")
    _box(axes, 67, 24, 15, 13, "Policy", "select(view)\n-> batch", fill="#dbe9f4")
    _box(axes, 88, 24, 17, 13, "GPU", "runs a batch\non its timeline")
    _box(axes, 76, 6, 20, 10, "Suspended", "keeps its KV blocks")
    _box(axes, 112, 24, 14, 13, "First\ntoken", "TTFT ends")
    for start, end in ((20, 26), (40, 47), (62, 67), (82, 88), (105, 112)):
        _arrow(axes, (start, 30.5), (end, 30.5))
    _arrow(axes, (97, 24), (92, 16), "paused at\na legal stop", (96.5, 19.5), "left")
    _arrow(axes, (79.5, 16), (75, 24), "chosen again", (76, 19.5), "right")
    axes.annotate("", (74.5, 37), (96.5, 37), arrowprops=_bent(0.22))
    axes.text(85.5, 40.6, "asked on every arrival and completion", ha="center", va="center", fontsize=6.5, color=INK)
    words = "A predictor tells the policy\nhow long work will take;\nit sees no output lengths."
    axes.text(47, 10.5, words, fontsize=6.5, color="0.35", va="center", linespacing=1.4)


def _gpu(axes: Axes) -> None:
    base, height = 13, 9
    axes.text(0, base + height / 2, "GPU", va="center", fontsize=8, weight="bold")
    _stretch(axes, 10, 52, base, height, LONG, [14, 18, 25, 29, 34, 38, 42])
    _stretch(axes, 52, 80, base, height, URGENT, [56, 61, 66, 71, 75])
    _stretch(axes, 80, 118, base, height, LONG, [84, 91, 95, 100, 104, 108, 115])
    axes.text(28, base - 3.6, "a long prompt; ticks end operators", ha="center", fontsize=6.5)
    axes.text(66, base - 3.6, "the urgent prompt", ha="center", fontsize=6.5)
    axes.text(99, base - 3.6, "the long one goes on where it was", ha="center", fontsize=6.5)
    for x, words, side in (
        (45.5, "urgent request arrives: flag", "right"),
        (52, "next legal stop: acknowledged", "left"),
    ):
        axes.plot([x, x], [base, base + 15], "-", color=INK, linewidth=0.9)
        away = -1 if side == "right" else 1
        axes.text(x + away, base + 14, words, ha=side, va="center", fontsize=7)
    axes.annotate("", (52, base + 11), (45.5, base + 11), arrowprops={"arrowstyle": "<->", "linewidth": 0.8})
    axes.annotate("blocking time", (48.7, base + 11), (36, base + 11), fontsize=7, va="center", ha="center",
                  arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": "0.5"})  # fmt: skip
    axes.plot([80], [base + height + 1.5], "v", color="black", markersize=4)
    axes.text(81.5, base + height + 2.6, "its first token", fontsize=7)
    words = "One simulator event for each stretch, none for the operators: the next stop is found by division."
    axes.text(10, 3.0, words, fontsize=7, color="0.35")


def _stretch(axes: Axes, start: float, end: float, base: float, height: float, colour: str, ticks: list[int]) -> None:
    axes.barh(base + height / 2, end - start, left=start, height=height, color=colour, edgecolor="white")
    for tick in ticks:
        axes.plot([tick, tick], [base, base + height], "-", color="white", linewidth=0.7)


def _box(
    axes: Axes, x: float, y: float, width: float, height: float, name: str, words: str, fill: str = "white"
) -> None:
    axes.add_patch(_rounded(x, y, width, height, facecolor=fill, edgecolor=INK))
    lines = name.count("\n")
    axes.text(x + width / 2, y + height - 3.2 - 1.6 * lines, name, ha="center", va="center", fontsize=8, weight="bold")
    axes.text(x + width / 2, y + (height - 5.4 - 3.2 * lines) / 2, words, ha="center", va="center", fontsize=6.5)


def _rounded(x: float, y: float, width: float, height: float, **look: Any) -> Any:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=1.2", linewidth=0.8, **look)


def _arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    words: str = "",
    at: tuple[float, float] = (0.0, 0.0),
    side: str = "center",
) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "linewidth": 0.9, "color": INK})
    axes.text(*at, words, ha=side, va="center", fontsize=6.5, color=INK)


def _bent(curve: float) -> dict[str, Any]:
    style = f"arc3,rad={curve}"
    return {"arrowstyle": "-|>", "linewidth": 0.7, "linestyle": ":", "color": INK, "connectionstyle": style}


if __name__ == "__main__":
    save(flow(), PICTURE)
