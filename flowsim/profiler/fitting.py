"""`python -m flowsim.profiler fit TRACE ... --out PROFILE --report FOLDER`: a profile and its report from traces."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd

from flowsim.profile import read_profile
from flowsim.profiler.build import Overheads, build_profile, default_overheads, render
from flowsim.profiler.models import load_gpu, load_shapes, model_names
from flowsim.profiler.trace import read_trace

__all__ = ["configure", "run"]

OVERHEADS = ("pass_s", "request_s", "check_s", "switch_s")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `fit`."""
    parser.add_argument("traces", type=Path, nargs="+", help="operator traces, joined; .csv, .csv.gz or .parquet")
    parser.add_argument("--out", type=Path, required=True, help="the profile to write, such as my_gpu.yaml")
    parser.add_argument("--report", type=Path, help="folder for the fit report: a table and a figure per operator")
    parser.add_argument("--model", help="fit the rows of this model only")
    parser.add_argument("--gpu", help="fit the rows of this GPU only")
    parser.add_argument("--config", help="shapes: a Hugging Face config.json (default: the trace's model by name)")
    parser.add_argument("--gpu-memory-bytes", type=int, help="of one GPU (default: from the table of known GPUs)")
    for name in OVERHEADS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, help="an overhead of the profile, seconds")


def run(options: argparse.Namespace) -> int:
    """Fits, writes the profile and the report, and prints what was left out; ValueError for what cannot be fitted."""
    trace = pd.concat([read_trace(path) for path in options.traces], ignore_index=True)
    for column in ("model", "gpu"):
        wanted = getattr(options, column)
        if wanted:
            found = ", ".join(sorted(trace[column].unique()))
            trace = trace[trace[column] == wanted]
            if trace.empty:
                raise ValueError(f"no rows with {column} {wanted!r}; found: {found}")
    model, gpu = str(trace["model"].iloc[0]), str(trace["gpu"].iloc[0])
    if options.config is None and model not in model_names():
        raise ValueError(f"the shapes of {model!r} are not known; give --config its Hugging Face config.json")
    shapes = load_shapes(options.config or model)
    overheads = _overheads(options, gpu, has_lm_head="lm_head" in set(trace["operator"]))
    profile, fits = build_profile(
        trace,
        shapes,
        gpu_memory_bytes=options.gpu_memory_bytes or load_gpu(gpu).memory_bytes,
        overheads=overheads,
        note=lambda text: print(text, file=sys.stderr),
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(render(profile, "python -m flowsim.profiler fit"), encoding="utf-8")
    read_profile(options.out)
    print(f"{len(fits)} operators in {options.out}")
    if options.report:
        from flowsim.profiler.report import write_report

        write_report(profile, fits, trace, options.report)
        print(f"the fit report is {options.report / 'report.md'}")
    return 0


def _overheads(options: argparse.Namespace, gpu: str, *, has_lm_head: bool) -> Overheads:
    given = {name: getattr(options, name) for name in OVERHEADS if getattr(options, name) is not None}
    overheads = default_overheads(gpu, has_lm_head=has_lm_head)
    if not given:
        return overheads
    return replace(overheads, **given, source=f"{', '.join(given)} as given to the fit; the rest: {overheads.source}")
