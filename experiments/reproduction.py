"""docs/reproduction.md: the paper's figures beside ours, written from the results that are kept.

python -m experiments.reproduction          # writes the page and draws its figures from experiments/results/
python -m experiments.reproduction --run    # runs every experiment first (`make figures`)
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.paper import IMAGES, RESULTS, ROOT, Claim, Experiment, command, kept, reproduce
from flowsim.report.plots import save

NAMES = (
    "attainment_by_rate",
    "goodput_by_model",
    "relative_slos",
    "strictest_slo",
    "chunk_size",
    "blocking",
    "granularity",
    "ordering",
    "batching",
    "event_driven",
    "prediction",
    "burstiness",
    "long_prompts",
    "tensor_parallel",
)
DOCUMENT = ROOT / "docs" / "reproduction.md"
HEAD = """\
<!-- Written by `python -m experiments.reproduction`; edit the modules in experiments/, not this file. -->
# The paper, reproduced

FlowPrefill ([arXiv 2602.16603](https://arxiv.org/abs/2602.16603)) in the simulator, figure by figure. `make figures`
runs all of it; each experiment is `python -m experiments.NAME`, or `python -m flowsim +experiment=NAME` for its tables
alone, and its set-up is `conf/experiment/NAME.yaml`. The published figures were measured on A800 GPUs with the
production trace Qwen-Bailian A. Ours are simulated on the `a800` profiles (operators of an A100 scaled by 1.03, and
overheads read off the published run), with prompt lengths drawn from that trace's published quantiles (workload
`mixed`) and Poisson arrivals. Nothing here was fitted to the figures in the table. Goodput is the highest rate at which
90 % of all requests meet their TTFT SLO, run to drain; it falls as runs get longer, so it is always quoted with the
number of requests. Common random numbers throughout: in a comparison every policy sees the same requests.
"""
LEGEND = """
`holds` says whether ours is within the published range; `-` where the paper states no figure that can be held against
ours. Run time is in seconds of one processor core, all seeds together.
"""


def experiments(names: Sequence[str] = NAMES) -> list[Experiment]:
    """The experiments of these names."""
    return [importlib.import_module(f"experiments.{name}").EXPERIMENT for name in names]


def page(found: Sequence[Experiment], results: Path = RESULTS) -> str:
    """The document, from kept results."""
    rows, sections, total_s = [], [], 0.0
    for experiment in found:
        table, about = kept(experiment, results)
        size = _size(table)
        total_s += about["processor_s"]
        rows += [_row(experiment, claim, size, about) for claim in experiment.claims(table)]
        sections.append(_section(experiment, table, size, about))
    header = ("what", "published", "ours", "holds", "requests", "experiment", "run time")
    rule = ("---", "--:", "--:", "---", "--:", "---", "--:")
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)]
    together = f"\nAll together: {total_s / 60:.0f} minutes of one core.\n"
    return "\n".join([HEAD, *lines, LEGEND.rstrip("\n"), together, *sections])


def _size(table: pd.DataFrame) -> str:
    """Requests and seeds of a run."""
    if "num_requests" in table:
        return f"{int(table.num_requests.max())} x {int(table.seeds.max())}"
    return f"{int(table.requests.max())} x {table.seed.nunique()}"


def _row(experiment: Experiment, claim: Claim, size: str, about: dict[str, Any]) -> tuple[str, ...]:
    holds = {None: "-", True: "yes", False: "**no**"}[claim.holds]
    link = f"[{experiment.name}](#{experiment.name})"
    return claim.what, claim.published, claim.ours, holds, size, link, f"{about['processor_s']:.0f} s"


def _section(experiment: Experiment, table: pd.DataFrame, size: str, about: dict[str, Any]) -> str:
    figure = f"![{experiment.title}](img/paper_{experiment.name}.png)"
    where = f"`{command(experiment)}`, {size} requests (per run x seeds), {about['date']}, flowsim {about['flowsim']}."
    return f"## {experiment.name}\n\n{experiment.title}.\n\n{figure}\n\n{experiment.words(table)}\n\n{where}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run every experiment first")
    parser.add_argument("--jobs", type=int, default=-1, help="processes; -1 for one a core")
    options = parser.parse_args(arguments)
    for experiment in experiments():
        if options.run:
            print(f"{experiment.name}: {experiment.title}", flush=True)
            reproduce(experiment, jobs=options.jobs, extra=(), results=RESULTS, images=IMAGES)
        else:
            table, _ = kept(experiment)
            save(experiment.draw(table), IMAGES / f"paper_{experiment.name}.png")
    DOCUMENT.write_text(page(experiments()), encoding="utf-8")


if __name__ == "__main__":
    main()
