"""The report `html`: one or several runs on one page that needs no network to be viewed.

jinja2 lays the page out, plotly.js (in the page) draws; both are imported only when a page is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from flowsim.metrics import Result
from flowsim.profile import load_profile
from flowsim.report.charts import (
    Figure,
    aligned,
    blocking,
    latency_cdf,
    over_time,
    pauses,
    side_by_side_cdf,
    suspension,
    ttft_histogram,
)
from flowsim.report.measures import by_class, cards, class_table, paired, scheduler, seconds
from flowsim.report.story import Chronicle, tell, worst
from flowsim.report.timeline_data import timeline
from flowsim.report.trace import checked_window
from flowsim.summary import gpu_words

__all__ = ["Html", "Run", "load_runs", "write_page"]

Draw = Callable[[Result], Figure]
PAGE = Path(__file__).parent / "page"
WORST = 10


@dataclass(frozen=True)
class Run:
    """A result with what its folder says of where it came from."""

    label: str
    title: str
    result: Result
    folder: str = ""
    config: str = ""
    overrides: Sequence[str] = field(default_factory=list)


class Html:
    """Writes `report.html`: the run on one page, with a timeline of `window_s` drawn first."""

    def __init__(self, window_s: Sequence[float] | None = None) -> None:
        self.window_s = checked_window(window_s)

    def write(self, result: Result, folder: Path, title: str) -> list[Path]:
        """Writes the page; returns its path."""
        config, overrides, _ = _provenance(folder)
        run = Run(title.split(" on ", 1)[0] or "run", title, result, str(folder), config, overrides)
        return [write_page([run], folder / "report.html", self.window_s)]


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in some folders, each under a label of its own.

    Raises:
        ValueError: a folder that is not one of a run, or given twice.
    """
    found = []
    for folder in folders:
        config, overrides, choices = _provenance(folder)
        result = Result.load(folder)
        policy, workload = choices.get("policy", ""), choices.get("workload", "")
        chosen = f"{policy} on {workload}, " if policy and workload else ""
        title = f"{chosen}{result.run['model']} on {gpu_words(result.run)}"
        found.append(Run(policy or folder.name, title, result, str(folder), config, overrides))
    labels = _labels([run.label for run in found], folders)
    return [
        Run(label, one.title, one.result, one.folder, one.config, one.overrides)
        for label, one in zip(labels, found, strict=True)
    ]


def write_page(runs: Sequence[Run], path: Path, window_s: tuple[float, float] | None = None) -> Path:
    """Writes one page on one run, or on several side by side; returns its path."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=FileSystemLoader(PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    results = [run.result for run in runs]
    classes = sorted({name for result in results for name in result.tables["requests"]["slo_class"].tolist()})
    sections = _sections(runs, classes)
    figures = {
        panel["id"]: panel["figure"]
        for section in sections.values()
        for panels in section
        for panel in panels["figures"]
    }
    data = {
        "figures": figures,
        "classes": classes,
        "labels": [run.label for run in runs],
    }
    summaries = [result.summary() for result in results]
    text = environment.get_template("page.html.j2").render(
        runs=runs,
        sections=sections,
        cards=cards(summaries),
        class_table=class_table(results[0], summaries[0], classes) if len(runs) == 1 else {},
        class_rows=by_class(summaries, classes),
        paired=paired(results, classes),
        scheduler=scheduler(summaries),
        warnings=[_warnings(summary) for summary in summaries],
        stories=[_stories(result) for result in results],
        settings=_settings(runs),
        profiles=[text for run in runs if (text := _profile(run))],
        version=metadata.version("flowsim-prefill"),
        data=_json(data),
        timelines=[_json(timeline(result, classes, window_s)) for result in results],
        style=(PAGE / "page.css").read_text(encoding="utf-8"),
        script=(PAGE / "page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
    )
    path.write_text(text, encoding="utf-8")
    return path


def _json(data: Mapping[str, Any]) -> str:
    """JSON that may stand in a script element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")


def _sections(runs: Sequence[Run], classes: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The charts of each tab: panels of one figure a run, on the same axes."""
    results = [run.result for run in runs]
    span_s = _span(results, "ttft_s")
    by_run = {
        "latency": [
            ("TTFT", "", lambda one: latency_cdf(one, classes, "ttft_s", "TTFT [s]", "ttft_slo_s")),
            ("TTFT by class", "", lambda one: ttft_histogram(one, classes, span_s)),
            ("Time in the queue", QUEUED, lambda one: latency_cdf(one, classes, "queued_s", "queued [s]")),
            *(_tbt_panels(classes) if any(map(_has_tbt, results)) else []),
        ],
        "time": [("Attainment, load, queue and KV blocks", OVER_TIME, lambda one: over_time(one, classes))],
        "preemption": [
            ("Blocking", BLOCKING, blocking),
            ("Who was paused for whom", "", lambda one: pauses(one, classes)),
            ("Time suspended", SUSPENDED, lambda one: suspension(one, classes)),
        ],
    }
    sections: dict[str, list[dict[str, Any]]] = {}
    for tab, panels in by_run.items():
        sections[tab] = []
        for number, (title, note, draw) in enumerate(panels):
            drawn = [(run.label if len(runs) > 1 else "", draw(run.result)) for run in runs]
            aligned([one for _, one in drawn])
            sections[tab].append(_panel(f"{tab}-{number}", title, note, drawn))
    if len(runs) > 1:
        named = {run.label: run.result for run in runs}
        drawn = [(name, side_by_side_cdf(named, name)) for name in classes]
        sections["latency"].insert(0, _panel("compared", "TTFT of each class, all runs", "", drawn))
    return sections


QUEUED = "From arrival to the first segment; 0.1 ms and less is drawn at the left end."
OVER_TIME = "Attainment is of the requests that arrived in a stretch of time; all else is of what happened in it."
BLOCKING = "A signal asks the running batch to stop; it is acknowledged at the next legal stop, or at the batch's end."
TBT = "The mean of each request of two tokens or more; a request meets its TBT SLO if its mean does."
SUSPENDED = "Of the requests that were suspended at all."


def _panel(name: str, title: str, note: str, drawn: Sequence[tuple[str, Figure]]) -> dict[str, Any]:
    """A panel, as the template takes it."""
    figures = [
        {"id": f"{name}-{place}", "caption": caption, "figure": one} for place, (caption, one) in enumerate(drawn)
    ]
    return {"title": title, "note": note, "figures": figures}


def _tbt_panels(classes: Sequence[str]) -> list[tuple[str, str, Draw]]:
    def mean(one: Result) -> Figure:
        return latency_cdf(one, classes, "tbt_mean_s", "mean time between tokens [s]", "tbt_slo_s")

    def longest(one: Result) -> Figure:
        return latency_cdf(one, classes, "tbt_max_s", "longest time between tokens [s]")

    return [("Time between tokens (TBT)", TBT, mean), ("Longest time between tokens", "", longest)]


def _has_tbt(result: Result) -> bool:
    return bool((~np.isnan(result.tables["requests"]["tbt_max_s"])).any())


def _span(results: Sequence[Result], column: str) -> tuple[float, float]:
    """The least and the largest of a column over all runs, fit for a logarithmic axis."""
    values = np.concatenate([result.tables["requests"][column] for result in results])
    values = values[~np.isnan(values) & (values > 0)]
    return (float(values.min()) * 0.95, float(values.max()) * 1.05) if len(values) else (0.01, 1.0)


def _stories(result: Result) -> list[dict[str, Any]]:
    """The requests that fared worst, each with its story."""
    chronicle, requests = Chronicle(result), result.tables["requests"]
    found = []
    for row, times in worst(requests, WORST):
        story = chronicle.story(row)
        last_s = story.spells[-1].end_s if story.spells else float(requests["arrival_s"][row])
        found.append(
            {
                "id": row,
                "class": requests["slo_class"][row],
                "tokens": int(requests["prompt_tokens"][row]),
                "arrival": f"{requests['arrival_s'][row]:.3f}",
                "ttft": seconds(float(requests["ttft_s"][row])),
                "times": f"{times:.3g}",
                "of": "SLO" if np.isfinite(requests["ttft_slo_s"][row]) else "TTFT alone",
                **{state: _seconds(story.seconds(state)) for state in ("waiting", "suspended", "running")},
                "from_s": float(requests["arrival_s"][row]),
                "to_s": last_s,
                "told": tell(story, requests),
            }
        )
    return found


def _seconds(value: float) -> str:
    return seconds(value) if value else "–"


def _warnings(summary: Mapping[str, Any]) -> list[str]:
    """What a reader of the figures must know."""
    found = []
    if summary.get("partial"):
        found.append("The run was ended before its workload was: these are partial results.")
    if not summary["measured"]:
        found.append("No request is measured.")
    texts = {
        "rejected": "requests were rejected",
        "unfinished": "requests did not finish",
        "impossible": "requests have an SLO under their TTFT on an idle instance",
        "extrapolated": "requests are longer than the profile was measured for",
    }
    return found + [f"{summary[key]} {text}." for key, text in texts.items() if summary[key]]


def _settings(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Every key of the configurations and of `run.json`: its value in each run, and whether they differ."""
    flat = [_flat(yaml.safe_load(run.config) or {}) | _flat({"run": dict(run.result.run)}) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [{"key": key, "cells": [one.get(key, "–") for one in flat]} for key in keys]
    return [{**row, "differs": len(set(row["cells"])) > 1} for row in rows]


def _profile(run: Run) -> str:
    """Where the latencies of a run come from; empty where its configuration or its profile is not at hand."""
    config = yaml.safe_load(run.config) or {}
    try:
        path = load_profile(config["model"], str(config["gpu"])).path
        read = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (KeyError, OSError, ValueError):
        return ""
    sources = [", ".join(map(str, one.values())) for one in read.get("sources", {}).values()]
    told = [f"{run.label}: latencies of {read['model']} on {read['gpu']} from {'; '.join(sources) or path}"]
    return (
        ". ".join([*told, *(str(read[key]).rstrip(".") for key in ("software", "overheads_source") if key in read)])
        + "."
    )


def _flat(node: Any, prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted keys; all else as text."""
    if not isinstance(node, Mapping):
        return {prefix: node if isinstance(node, str) else json.dumps(node, default=str)}
    return {
        key: text
        for name, value in node.items()
        for key, text in _flat(value, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def _provenance(folder: Path) -> tuple[str, list[str], dict[str, str]]:
    """The configuration of a run's folder, what was typed, and what was chosen of each group; empty without them."""
    config, hydra = folder / "config.yaml", folder / ".hydra" / "hydra.yaml"
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    if not hydra.is_file():
        return text, [], {}
    read = yaml.safe_load(hydra.read_text(encoding="utf-8"))["hydra"]
    return text, [one.removeprefix("++") for one in read["overrides"]["task"]], dict(read["runtime"]["choices"])


def _labels(names: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """The names, with as much of the folders as tells them apart."""
    if len(set(names)) == len(names):
        return list(names)
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"a run is given twice: {', '.join(map(str, folders))}")
    ends = [folder.name for folder in folders]
    if len(set(ends)) < len(ends):
        shared = os.path.commonpath([folder.resolve() for folder in folders])
        ends = [os.path.relpath(folder.resolve(), shared) for folder in folders]
    return [f"{name} ({end})" for name, end in zip(names, ends, strict=True)]
