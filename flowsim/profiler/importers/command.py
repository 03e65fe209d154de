"""`python -m flowsim.profiler import SOURCE ...`: published measurements into an operator trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from flowsim.profiler.importers.aiconfigurator import ROUTING, Choices, import_aiconfigurator
from flowsim.profiler.importers.llmservingsim import Files, Link, import_llmservingsim
from flowsim.profiler.importers.perf_tables import PerfTables
from flowsim.profiler.importers.rows import Origin
from flowsim.profiler.importers.vidur import SOFTWARE, import_vidur
from flowsim.profiler.models import Shapes, load_gpu, load_shapes, model_names
from flowsim.profiler.trace import read_trace, validate, write_trace

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds a sub-command for each source."""
    sources = parser.add_subparsers(dest="source", required=True, metavar="SOURCE")
    package = sources.add_parser("aiconfigurator", help="kernels of the aiconfigurator-core package, for any model")
    _add_model(package)
    package.add_argument("--system", required=True, help="its name of the GPU, such as h100_sxm")
    package.add_argument("--backend", default="vllm", help="whose kernels (default: vllm)")
    package.add_argument("--version", default="", help="of the backend (default: the newest of each table)")
    package.add_argument("--all-reduce", choices=("eager", "graph"), default="eager", help="default: eager")
    package.add_argument("--routing", default=ROUTING, help=f"how tokens fall on experts (default: {ROUTING})")
    package.add_argument("--elementwise", type=Path, help="a Vidur mlp.csv of this GPU for norms, rope, act and adds")
    package.add_argument("--elementwise-model", default="llama3-8b", help="the model that it measured")
    vidur = sources.add_parser("vidur", help="Vidur's mlp.csv, attention.csv and all_reduce.csv")
    _add_model(vidur)
    vidur.add_argument("--gpu", required=True, help="name of the GPU in the trace")
    for name in ("--mlp", "--attention", "--all-reduce"):
        vidur.add_argument(name, type=Path)
    simulator = sources.add_parser(
        "llmservingsim", help="LLMServingSim's dense, attention, moe and per_sequence tables"
    )
    _add_model(simulator)
    simulator.add_argument("--gpu", required=True, help="name of the GPU in the trace")
    for name, needed in (("--dense", True), ("--attention", True), ("--moe", False), ("--per-sequence", False)):
        simulator.add_argument(name, type=Path, required=needed)
    simulator.add_argument("--names", nargs=2, metavar=("GPU", "MODEL"), default=("", ""), help="in joined tables")
    link = Link()
    simulator.add_argument("--link-latency-s", type=float, default=link.latency_s, help="of an all-reduce")
    simulator.add_argument("--link-bytes-per-s", type=float, default=link.bandwidth_bytes_per_s)
    plain = sources.add_parser("csv", help="operator traces of this project: validate and join them")
    plain.add_argument("traces", type=Path, nargs="+")
    plain.add_argument("--out", type=Path, required=True, help="the trace to write")


def _add_model(parser: argparse.ArgumentParser) -> None:
    choices = ", ".join(model_names())
    parser.add_argument("--model", required=True, help=f"{choices}, or the path of a Hugging Face config.json")
    parser.add_argument("--tp", type=int, nargs="+", default=[1], help="TP degrees (default: 1)")
    parser.add_argument("--out", type=Path, required=True, help="the trace to write: .csv, .csv.gz or .parquet")


def run(options: argparse.Namespace) -> int:
    """Imports, reports the gaps on stderr, and writes the trace; ValueError for what cannot be imported."""
    if options.source == "csv":
        trace = pd.concat([read_trace(path) for path in options.traces], ignore_index=True)
    else:
        shapes = load_shapes(options.model)
        trace = pd.concat([SOURCES[options.source](options, shapes, tp) for tp in options.tp], ignore_index=True)
    write_trace(validate(trace, options.source), options.out)
    print(f"{len(trace)} rows of {trace['operator'].nunique()} operators in {options.out}")
    return 0


def _aiconfigurator(options: argparse.Namespace, shapes: Shapes, tp: int) -> pd.DataFrame:
    tables = PerfTables(options.system, options.backend, options.version)
    measured = load_shapes(options.elementwise_model).rank(tp) if options.elementwise else None
    choices = Choices(
        all_reduce=options.all_reduce, routing=options.routing, elementwise=options.elementwise, measured=measured
    )
    return import_aiconfigurator(tables, shapes.rank(tp), load_gpu(options.system), choices, _note(tp))


def _vidur(options: argparse.Namespace, shapes: Shapes, tp: int) -> pd.DataFrame:
    origin = Origin(model=shapes.name, gpu=options.gpu, tp=tp, statistic="median", software=SOFTWARE)
    files = {"mlp": options.mlp, "attention": options.attention, "all_reduce": options.all_reduce}
    return import_vidur(origin, shapes.rank(tp), **files)


def _llmservingsim(options: argparse.Namespace, shapes: Shapes, tp: int) -> pd.DataFrame:
    origin = Origin(model=shapes.name, gpu=options.gpu, tp=tp, statistic="mean", software="LLMServingSim profiler")
    files = Files(dense=options.dense, attention=options.attention, moe=options.moe, per_sequence=options.per_sequence)
    link = Link(options.link_latency_s, options.link_bytes_per_s)
    return import_llmservingsim(origin, shapes.rank(tp), files, names=tuple(options.names), link=link, note=_note(tp))


SOURCES: dict[str, Callable[[argparse.Namespace, Shapes, int], pd.DataFrame]] = {
    "aiconfigurator": _aiconfigurator,
    "vidur": _vidur,
    "llmservingsim": _llmservingsim,
}


def _note(tp: int) -> Callable[[str], None]:
    return lambda text: print(f"tp {tp}: {text}", file=sys.stderr)
