"""What the tasks of studies say and write: progress, words, JSON, tables, figures' data, and the runs that failed."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowsim.core import FailedRunsError
from flowsim.report import NoReport
from flowsim.report.plots import save
from flowsim.report.terminal import StudyProgress
from flowsim.study.bounds import BOUNDS
from flowsim.study.runs import StudyWarning
from flowsim.study.workers import Progress

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "bound_words", "bounded", "bounds_of", "cells", "curves", "differences", "draw", "ended", "interval", "rate_words",
    "rows_of", "say", "scale_words", "settings", "share_of", "studied", "write_json", "write_runs",
]  # fmt: skip

Found = TypeVar("Found")
SHOWN_FAILURES = 10
APART = 0.04
PLAIN = {"bound": "any schedule", "bound_alone": "any without batching"}


def studied(study: Callable[[Progress | None], Found], folder: Path, quiet: bool) -> Found:
    """A study with its progress; where it is interrupted, says what is kept."""
    try:
        with warnings.catch_warnings(), StudyProgress() as progress:
            warnings.simplefilter("ignore", StudyWarning)  # they are listed at the end
            return study(None if quiet else progress)
    except KeyboardInterrupt:
        kept = folder / "points.jsonl"
        count = kept.read_bytes().count(b"\n") if kept.is_file() else 0
        Console(stderr=True, markup=False).print(
            f"{count} runs are kept in {kept}; the same command with hydra.run.dir={folder} runs only what is missing",
            highlight=False,
            soft_wrap=True,
        )
        raise


def write_runs(evaluations: pd.DataFrame, bounds: pd.DataFrame | None, folder: Path) -> None:
    """`evaluations.csv`, and `bounds.csv` where there are some."""
    evaluations.to_csv(folder / "evaluations.csv", index=False)
    if bounds is not None:
        bounds.to_csv(folder / "bounds.csv", index=False)


def ended(evaluations: pd.DataFrame, folder: Path, bounds: pd.DataFrame | None = None) -> int:
    """How many runs ended well, and bounds where there are some; `failed.csv` lists those that did not.

    Raises:
        FailedRunsError: there are some.
    """
    if bounds is not None:
        import pandas as pd

        evaluations = pd.concat([evaluations, bounds[[name for name in bounds if name != "bound"]]])
    failed = evaluations[evaluations["error"].notna()]
    path = folder / "failed.csv"
    if failed.empty:
        path.unlink(missing_ok=True)
        return len(evaluations)
    front = list(evaluations.columns[: list(evaluations.columns).index("seed") + 1])
    failed[[*front, "error"]].to_csv(path, index=False)
    lines = [
        ", ".join(f"{name}={value}" for name, value in row.items() if name != "error") + f": {row['error']}"
        for row in failed[[*front, "error"]].head(SHOWN_FAILURES).to_dict("records")
    ]
    more = [f"and {len(failed) - len(lines)} more"] if len(failed) > len(lines) else []
    raise FailedRunsError(
        "\n  ".join([f"{len(failed)} of {len(evaluations)} runs failed, listed in {path}:", *lines, *more])
    )


def draw(report: Any, path: Path, figure: Callable[[], Any]) -> None:
    """A figure in the report's format; none where the report is none."""
    if not isinstance(report, NoReport):
        save(figure(), path.with_name(f"{path.name}.{getattr(report, 'format', 'png')}"))


def curves(
    evaluations: pd.DataFrame,
    key: str,
    name: str,
    attained: str,
    per_class: bool,
    bounds: pd.DataFrame | None = None,
) -> tuple[pd.DataFrame, str, str | None]:
    """(table, y, by) for a figure of attainment against a setting; a line for each class where each has to hold, and
    for each bound.

    Values that lie within 4 % of one that is drawn are left out, for a bisection ends in a heap of them.
    """
    table, by = _apart(evaluations, key, name), "class"
    if per_class:
        prefix = f"{attained}_by_class."
        classes = [column for column in table.columns if column.startswith(prefix)]
        table = table[[name, "seed", *classes]].melt([name, "seed"], var_name="class", value_name=attained)
        table = table.assign(**{"class": table["class"].str.removeprefix(prefix)})
    if bounds is None:
        return table, attained, by if per_class else None
    import pandas as pd

    if not per_class:
        table, by = table.assign(schedule=table.get("policy", "this policy")), "schedule"
    words = {batching: PLAIN[prefix] + ", all" * per_class + ", at most" for prefix, batching in BOUNDS.items()}
    best = _apart(bounds, key, name)
    best = best[best[attained].notna()]
    columns = [name, "seed", attained, by]
    return pd.concat([table[columns], best.assign(**{by: best["bound"].map(words)})[columns]]), attained, by


def _apart(runs: pd.DataFrame, key: str, name: str) -> pd.DataFrame:
    """Runs that ended at values of a setting that lie apart, under another name."""
    kept = runs[runs["error"].isna()].drop(columns=name, errors="ignore").rename(columns={key: name})
    drawn: list[float] = []
    for value in dict.fromkeys(kept[name]):  # as they were tried: the last of a bisection are the nearest
        if all(abs(math.log(value / other)) > APART for other in drawn):
            drawn.append(value)
    return kept[kept[name].isin(drawn)]


def rows_of(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as JSON takes them: Python's numbers, None for what is not there, and `inf` in words."""
    return [{str(name): _cell(value) for name, value in row.items()} for row in table.to_dict("records")]


def _cell(value: Any) -> Any:
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, float) and not math.isfinite(plain):
        return None if math.isnan(plain) else str(plain)
    return plain


def settings(row: Mapping[str, Any]) -> dict[str, Any]:
    """What follows the column `error`."""
    names = list(row)
    return {name: row[name] for name in names[names.index("error") + 1 :]}


def interval(row: Mapping[str, Any], name: str) -> list[float] | None:
    ends = [row[f"{name}_low"], row[f"{name}_high"]]
    return None if None in ends else ends


def bounds_of(row: Any, unit: str) -> dict[str, Any]:
    """The bounds that a row, or a table, has beside its goodput (`rps`) or its SLO scale (`scale`)."""
    return {name: row[name] for prefix in BOUNDS if (name := f"{prefix}_{unit}") in row}


def share_of(bound: str) -> str:
    """The column with what was found as a share of a bound."""
    return f"{bound.rpartition('_')[0]}_share"


def bounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """All columns of bounds that a row has."""
    return {name: value for name, value in row.items() if name.startswith(tuple(BOUNDS))}


def bound_words(row: Mapping[str, Any], unit: str) -> list[str]:
    """A line for each bound beside a goodput (`rps`) or an SLO scale (`scale`)."""
    who = {prefix: text + ", of all requests" * row["per_class"] for prefix, text in PLAIN.items()}
    edge, words, whole = {"rps": ("at most", " req/s", "it"), "scale": ("at least", "", "that strictness")}[unit]
    lines = []
    for bound, value in bounds_of(row, unit).items():
        prefix = bound.removesuffix(f"_{unit}")
        share = row[f"{prefix}_share"]
        if value is None:
            lines.append(f"{who[prefix]}: none keeps the target within the bracket")
            continue
        beyond = row[f"{prefix}_end"] in ("high", "strictest")  # so that the share is too large
        text = f"{who[prefix]}: {'beyond' if beyond else edge} {value:.3g}{words}"
        if share is not None and not beyond:
            text += f"; this policy reaches {share:.0%} of {whole}{_share_words(row, prefix)}"
        lines.append(text)
    return lines


def _share_words(row: Mapping[str, Any], prefix: str) -> str:
    ends = interval(row, f"{prefix}_share")
    return f" (95 % interval {ends[0]:.0%} to {ends[1]:.0%})" if ends else ""


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _whom(target: float, per_class: bool) -> str:
    return f"{100.0 * target:.4g}% of {'the requests of each class' if per_class else 'all requests'} within their SLOs"


def _ci_words(row: Mapping[str, Any], name: str, unit: str = "") -> str:
    ends = interval(row, name)
    return f" (95 % interval {ends[0]:.3g} to {ends[1]:.3g}{unit})" if ends else ""


def _rate(rps: float) -> str:
    return f"{rps:.2f}" if rps >= 1.0 else f"{rps:.3g}"


def rate_words(row: Mapping[str, Any], target: float, per_class: bool) -> list[str]:
    ran = f"{row['num_requests']} requests, {row['seeds']} seeds, {row['runs']} runs"
    if row["goodput_rps"] is None:
        return [f"no goodput: even the lowest rate fails ({_whom(target, per_class)}; {ran})"]
    reached = "at least " if row["bracket_end"] == "high" else ""
    ci = _ci_words(row, "goodput_rps", " req/s")
    lines = [f"goodput {reached}{_rate(row['goodput_rps'])} req/s{ci}", f"{_whom(target, per_class)}; {ran}"]
    return lines + ["the highest rate was reached; raise task.high_rps"] * (row["bracket_end"] == "high")


def scale_words(row: Mapping[str, Any], target: float, per_class: bool) -> list[str]:
    ran = f"{row['num_requests']} requests, {row['seeds']} seeds, {row['runs']} runs"
    if row["slo_scale"] is None:
        return [f"no scale holds, not even the loosest ({_whom(target, per_class)}; {ran})"]
    reached = "at most " if row["bracket_end"] == "strictest" else ""
    lines = [
        f"strictest SLO scale {reached}{row['slo_scale']:.3f}{_ci_words(row, 'slo_scale')}",
        f"{_whom(target, per_class)}; {ran}",
    ]
    return lines + ["the strictest scale was reached; add stricter ones to task.scales"] * bool(reached)


def say(lines: Sequence[str], folder: Path, title: str) -> None:
    console = Console(markup=False)
    console.print(Text(title, style="bold"))
    for line in [*lines, f"results in {folder}"]:
        console.print(line, highlight=False, soft_wrap=True)


def differences(rows: Sequence[Mapping[str, Any]], baseline: str, subject: str, seeds: int) -> Table:
    title = f"{subject}: differences to {baseline}, {seeds} seeds, 95 % intervals"
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy")
    for name in ("figure", "mean", "difference", "95 % interval", "ratio"):
        table.add_column(name, justify="left" if name == "figure" else "right", no_wrap=True)
    for row in rows:
        if row["policy"] != baseline:
            mean, difference, ratio = (_short(row[key]) for key in ("mean", "difference", "ratio"))
            ends = interval(row, "difference")
            between = " to ".join(map(_short, ends)) if ends else "-"
            table.add_row(row["policy"], row["figure"], mean, difference, between, ratio)
    return table


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def cells(found: pd.DataFrame, axes: list[str], figure: str, beside: Sequence[str] = ()) -> Table:
    """The mean over the seeds of the chosen figure for each cell, and of those beside it: bounds, and the shares of
    them that the figure is, in percent."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in axes:
        table.add_column(Text(name, overflow="fold"), overflow="fold")
    for name in (figure, *beside):
        head = "of it" if name in beside and name.endswith("_share") else name
        table.add_column(Text(head, overflow="fold"), justify="right", overflow="fold")
    for labels, rows in found.groupby(axes, sort=False, dropna=False):
        cells = labels if isinstance(labels, tuple) else (labels,)
        mean = rows[figure].mean()
        others = [_beside(name, rows[name].mean()) for name in beside]
        table.add_row(*(Text(str(cell)) for cell in cells), "failed" if mean != mean else f"{mean:.4g}", *others)
    return table


def _beside(name: str, mean: float) -> str:
    if mean != mean:
        return "-"
    return f"{mean:.0%}" if name.endswith("_share") else f"{mean:.4g}"
