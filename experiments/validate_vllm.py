"""Replays real vLLM runs on the simulated engine and holds it against them.

    python -m experiments.validate_vllm [--json OUT]
    python -m experiments.validate_vllm --requests FILE.csv[.gz] --model llama3-8b --gpu rtx4090 --max-num-seqs 256 \\
        --kv-tokens 41408 --prefix-hits HITS.csv --prefix-workload llama-3.1-8b

Without `--requests`: the two published runs of LLMServingSim's benchmark in the folder that FLOWSIM_DATA names (default
`../shared/data`). Requests arrive when they did and get as many tokens as they got; everything else is the engine's:
`cluster=colocated`, `policy=vllm` and the profile of the model on the GPU. The published runs have bars; exit status: 0
if they hold, 1 if one is missed, 2 for a mistake or without the data.

What comes from where. Operators: the profile, measured operator by operator on the GPU. `request_s`, 1.1 ms: the
delay from arrival to queue in the Llama run. Seconds of a step beyond its operators: none, as steps are formed ahead.
Decodes of unequal context (`decode_skew`, 0.06): published sweeps, which pool to 0.054 - 0.075; the Llama run was
looked at with 0.05 and 0.065 too (mean TTFT 2 points lower, 1 higher). KV memory: what the GPU has beside the weights.
The Qwen3-30B-A3B run is two data-parallel ranks with expert parallelism. The link between them is that of the published
TP 2 setup on the same machine, 40 us and 16 GB/s, which the TP 2 profiles have too. It is not fitted to the run, but
others were looked at: TPOT is 4 points lower with 20 us, 3 and 6 higher with 12 and 10 GB/s.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.real_flowprefill import data_folder
from flowsim import LatencyModel, Request, Result, load_profile, simulate
from flowsim.check import check_result
from flowsim.config import compose, make
from flowsim.pool import Cluster, Link, Pool
from flowsim.profile import MODEL_ALIASES
from flowsim.router import FewestRequests

REQUESTS = "llmservingsim_vllm_bench_requests.csv.gz"
HITS = "vllm_bench_prefix_hits.csv"
HIT_WORKLOADS = {"llama3-8b": "llama-3.1-8b"}  # of other models: the model's name
BLOCK_TOKENS = 16
EXCHANGE = Link(latency_s=4e-5, bytes_per_s=16e9)  # PCIe between two RTX PRO 6000: that of the published TP 2 setup
FIGURES = ("mean", "p50", "p90", "p99")
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}
BARS = {  # how far each figure may be off, as a share
    "llama3-8b": {
        "ttft": {"mean": 0.05, "p50": 0.08, "p90": 0.05, "p99": 0.05},
        "tpot": {"mean": 0.03},
        "e2e": {"mean": 0.03},
    },
    "qwen3-30b-a3b": {"ttft": {"mean": 0.20, "p50": 0.15}, "tpot": {"mean": 0.04}, "e2e": {"mean": 0.04}},
}

Comparison = dict[str, dict[str, dict[str, float]]]


@dataclass(frozen=True)
class Run:
    """One real run: what was asked, what it measured, and the engine it ran on."""

    model: str
    gpu: str
    tp: int
    ranks: int
    requests: tuple[Request, ...]
    measured: dict[str, np.ndarray]

    @property
    def name(self) -> str:
        return f"{self.model}/{self.gpu}"


@dataclass(frozen=True)
class Engine:
    """The engine's arguments that a run's file does not tell."""

    max_num_seqs: int = 128
    kv_tokens: int | None = None
    link: Link | None = None
    exchange: Link = EXCHANGE


def model_name(name: str) -> str:
    """A model's name among the profiles, from that or from the one on Hugging Face."""
    low = name.rsplit("/", 1)[-1].lower().replace("-instruct", "").removesuffix("-2507")
    return MODEL_ALIASES.get(name := low.replace("llama-3", "llama3"), name)


def read_runs(path: Path) -> list[Run]:
    """The runs of a file of per-request timestamps, in its order.

    Raises:
        ValueError: a file or a row that cannot be read, a column that is missing.
    """
    content = path.read_bytes()
    try:
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    rows = list(csv.DictReader(text.splitlines()))
    if not rows:
        raise ValueError(f"{path}: no requests")
    needed = ("prompt_tokens", "output_tokens", "arrival_s", "first_token_s", "last_token_s")
    missing = [name for name in needed if name not in rows[0]]
    if missing:
        raise ValueError(f"{path}: no column {', '.join(missing)}; it has {', '.join(rows[0])}")
    for number, row in enumerate(rows, start=2):
        _check_row(f"{path}, line {number}", row, needed)
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key, "") for key in ("gpu", "model", "tp", "dp")), []).append(row)
    return [_run(key, sorted(group, key=lambda row: float(row["arrival_s"]))) for key, group in groups.items()]


def _check_row(where: str, row: dict[str, str], needed: Sequence[str]) -> None:
    for name in needed:
        kind, least = (int, 1) if name.endswith("_tokens") else (float, -math.inf)
        try:
            fits = least <= kind(row[name]) < math.inf
        except (TypeError, ValueError):
            fits = False
        if not fits:
            allowed = "a whole number of at least 1" if kind is int else "a number of seconds"
            raise ValueError(f"{where}: {name} is {row[name]!r}; it must be {allowed}")


def _run(key: tuple[str, ...], rows: Sequence[dict[str, str]]) -> Run:
    gpu, model, tp, ranks = key

    def column(name: str) -> np.ndarray:
        return np.array([float(row[name]) for row in rows])

    arrival_s, first_s, last_s, output = map(column, ("arrival_s", "first_token_s", "last_token_s", "output_tokens"))
    ttft_s = column("ttft_s") if "ttft_s" in rows[0] else first_s - arrival_s
    requests = tuple(
        Request(
            id=place,
            arrival_s=float(row["arrival_s"]) - float(rows[0]["arrival_s"]),
            prompt_tokens=int(row["prompt_tokens"]),
            output_tokens=int(row["output_tokens"]),
        )
        for place, row in enumerate(rows)
    )
    measured = {
        "ttft": ttft_s,
        "tpot": column("tpot_s") if "tpot_s" in rows[0] else (last_s - first_s) / np.maximum(output - 1, 1),
        "e2e": last_s - arrival_s,
    }
    return Run(model_name(model), gpu.lower(), int(tp or 1), int(ranks or 1), requests, measured)


def with_prefixes(requests: Sequence[Request], path: Path, workload: str) -> tuple[Request, ...]:
    """Requests whose prompts share leading blocks as a table of hits of an infinite cache says.

    Raises:
        ValueError: a column that is missing, a workload that the table has not, or one of other prompts.
    """
    with path.open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    needed = ("workload", "request", "prompt_tokens", "prefix_hit_tokens_infinite_cache", "donor_request")
    missing = [name for name in needed if not table or name not in table[0]]
    if missing:
        raise ValueError(f"{path}: no column {', '.join(missing)}")
    rows = {int(row["request"]): row for row in table if row["workload"] == workload}
    if not rows:
        raise ValueError(f"{path}: no workload {workload!r}; it has {sorted({row['workload'] for row in table})}")
    names: dict[int, tuple[int, ...]] = {}
    fresh = 0
    for number in sorted(rows):
        shared = int(rows[number]["prefix_hit_tokens_infinite_cache"]) // BLOCK_TOKENS
        blocks = int(rows[number]["prompt_tokens"]) // BLOCK_TOKENS
        own = names[int(rows[number]["donor_request"])][:shared] if shared else ()
        names[number] = (*own, *range(fresh, fresh + blocks - len(own)))
        fresh += blocks - len(own)
    wrong = [
        one.id for one in requests if one.id not in rows or int(rows[one.id]["prompt_tokens"]) != one.prompt_tokens
    ]
    if wrong:
        raise ValueError(f"{path}: request {wrong[0]} of workload {workload} has another prompt than in the run")
    return tuple(replace(one, prefix_hashes=names[one.id]) for one in requests)


def replay(run: Run, engine: Engine) -> Result:
    """The run on the simulated engine; its laws are checked."""
    latency = LatencyModel(load_profile(run.model, run.gpu), run.tp)
    pool: Pool = make(compose(["cluster=colocated"]), "cluster")
    pool = replace(
        pool,
        instances=run.ranks,
        max_sequences=engine.max_num_seqs,
        kv_blocks=None if engine.kv_tokens is None else engine.kv_tokens // pool.block_tokens,
        collective=engine.exchange if run.ranks > 1 else engine.link,
        expert_parallel=run.ranks > 1,
    )
    policy = make(compose(["policy=vllm"]), "policy")
    result = simulate(run.requests, policy=policy, latency=latency, cluster=pool, router=FewestRequests())
    check_result(result, Cluster.of(pool).hardware(latency))
    return result


def compare(run: Run, result: Result) -> Comparison:
    """Each figure of each metric: measured, simulated, and by how much the simulated one is off, as a share."""
    requests = result.tables["requests"]
    lost = int((requests["outcome"] != "finished").sum())
    if lost:
        raise ValueError(f"{run.name}: {lost} requests did not finish; their KV exceeds --kv-tokens")
    output = requests["output_tokens"]
    simulated = {
        "ttft": requests["ttft_s"],
        "tpot": (requests["finish_s"] - requests["first_token_s"]) / np.maximum(output - 1, 1),
        "e2e": requests["finish_s"] - requests["arrival_s"],
    }
    found: Comparison = {}
    for metric in METRICS:
        found[metric] = {}
        for name, real, ours in zip(FIGURES, _figures(run.measured[metric]), _figures(simulated[metric]), strict=True):
            found[metric][name] = {"measured": real, "simulated": ours, "relative": ours / real - 1.0}
    return found


def _figures(values: np.ndarray) -> list[float]:
    return [float(values.mean()), *map(float, np.percentile(values, [50, 90, 99]))]


def exceeded(run: Run, found: Comparison) -> list[str]:
    """The figures of a published run that miss their bar."""
    return [
        f"{METRICS[metric]} {name} is {found[metric][name]['relative']:+.1%} off, {limit:.0%} allowed"
        for metric, limits in BARS.get(run.model, {}).items()
        for name, limit in limits.items()
        if abs(found[metric][name]["relative"]) > limit
    ]


def described(run: Run, result: Result) -> str:
    """What was replayed, in a line."""
    decode = result.summary()["decode"]
    ranks = f", {run.ranks} ranks" if run.ranks > 1 else ""
    return (
        f"{run.model} on {run.gpu}, tp {run.tp}{ranks}: {len(run.requests)} requests, "
        f"{decode['cached_tokens']} tokens from the prefix cache, {decode['evictions']} evictions"
    )


def table_of(found: Comparison) -> Table:
    """The comparison for the terminal, seconds."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("")
    for column in ("", "measured s", "simulated s", "off"):
        table.add_column(column, justify="right")
    for metric, label in METRICS.items():
        for name in FIGURES:
            one = found[metric][name]
            table.add_row(label, name, f"{one['measured']:.4g}", f"{one['simulated']:.4g}", f"{one['relative']:+.1%}")
            label = ""
    return table


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.validate_vllm", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--requests", type=Path, metavar="FILE", help="a run's requests; default: the published runs")
    parser.add_argument("--model", help="the profile's model; default: as the file says. Of several runs: this one")
    parser.add_argument("--gpu", help="the profile's GPU, likewise")
    parser.add_argument("--tp", type=int, help="GPUs of the engine, likewise")
    parser.add_argument("--max-num-seqs", type=int, default=128, help="sequences at a time, of a rank")
    parser.add_argument(
        "--kv-tokens", type=int, help="tokens of KV memory; default: what the GPU has beside the weights"
    )
    parser.add_argument(
        "--link-latency-us", type=float, help="of an all-reduce or exchange between GPUs; default: the profile's"
    )
    parser.add_argument("--link-gbps", type=float, help="and its bandwidth, GB/s")
    parser.add_argument("--prefix-hits", type=Path, metavar="FILE", help="shared prefixes of workloads")
    parser.add_argument("--prefix-workload", metavar="NAME", help="the workload in it")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the figures")
    return parser


def as_published(options: argparse.Namespace) -> bool:
    """Whether the published runs are replayed as they were: those have bars."""
    free = {"model", "gpu", "json"}
    given, default = vars(options), vars(_options().parse_args([]))
    return all(given[name] == default[name] for name in default.keys() - free)


def chosen(options: argparse.Namespace) -> list[Run]:
    """The runs that the options name, under the names that they give."""
    runs = read_runs(options.requests or data_folder() / REQUESTS)
    model, gpu = options.model and model_name(options.model), options.gpu and options.gpu.lower()
    named = [run for run in runs if model in (None, run.model) and gpu in (None, run.gpu)]
    if not named and len(runs) == 1:
        named = runs
    if not named:
        raise ValueError(f"no run of {model} on {gpu}; there are {', '.join(run.name for run in runs)}")
    return [replace(one, model=model or one.model, gpu=gpu or one.gpu, tp=options.tp or one.tp) for one in named]


def prepared(run: Run, options: argparse.Namespace) -> Run:
    """The run with the prefixes that its prompts share: those named, or for a published run its own."""
    if options.prefix_hits is not None or options.prefix_workload is not None:
        path = options.prefix_hits or data_folder() / HITS
        workload = options.prefix_workload or HIT_WORKLOADS.get(run.model, run.model)
    elif options.requests is None:
        path, workload = data_folder() / HITS, HIT_WORKLOADS.get(run.model, run.model)
    else:
        return run
    return replace(run, requests=with_prefixes(run.requests, path, workload))


def engine_of(options: argparse.Namespace) -> Engine:
    """The engine's arguments as given."""
    if options.kv_tokens is not None and options.kv_tokens < BLOCK_TOKENS:
        raise ValueError(f"--kv-tokens is {options.kv_tokens}; it must be at least {BLOCK_TOKENS}, one block")
    engine = Engine(max_num_seqs=options.max_num_seqs, kv_tokens=options.kv_tokens)
    if options.link_latency_us is None and options.link_gbps is None:
        return engine
    latency_us = 0.0 if options.link_latency_us is None else options.link_latency_us
    gbps = math.inf if options.link_gbps is None else options.link_gbps
    link = Link(latency_s=latency_us * 1e-6, bytes_per_s=gbps * 1e9)
    return replace(engine, link=link, exchange=link)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options().parse_args(arguments)
    console = Console(width=110, markup=False)
    missed: list[str] = []
    found: dict[str, Any] = {}
    try:
        for run in chosen(options):
            run = prepared(run, options)
            result = replay(run, engine_of(options))
            found[run.name] = compare(run, result)
            console.print(described(run, result), soft_wrap=True, highlight=False)
            console.print(table_of(found[run.name]))
            if as_published(options):
                missed += [f"{run.name}: {text}" for text in exceeded(run, found[run.name])]
        if options.json is not None:
            content = found if len(found) > 1 else next(iter(found.values()))
            options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for text in missed:
        print(text, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
