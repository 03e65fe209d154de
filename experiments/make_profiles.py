"""Fits every shipped profile from its measured data and writes profiles/<model>/<gpu>.yaml.

    python -m experiments.make_profiles [--only MODEL/GPU ...] [--report FOLDER]

Reads the tables of the package aiconfigurator-core (A100, H100, H200) and, in the folder that FLOWSIM_DATA names
(default `../shared/data`, from the checkout), Vidur's element-wise operators on A100 and LLMServingSim's tables of
RTX PRO 6000 and RTX 4090. The A800 is an A100 scaled. The same data give the same bytes.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from flowsim.profiler.build import build_profile, default_overheads, render
from flowsim.profiler.evaluate import pass_seconds
from flowsim.profiler.importers.aiconfigurator import Choices, import_aiconfigurator
from flowsim.profiler.importers.llmservingsim import Files, Link, import_llmservingsim
from flowsim.profiler.importers.perf_tables import PerfTables
from flowsim.profiler.importers.rows import Origin
from flowsim.profiler.models import load_gpu, load_shapes
from flowsim.profiler.report import write_report
from flowsim.profiler.trace import validate

CHECKOUT = Path(__file__).resolve().parents[1]
PROFILES = CHECKOUT / "profiles"
COMMAND = "python -m experiments.make_profiles"

DEGREES = {
    "llama3-8b": (1, 2, 4),
    "qwen2.5-14b": (1, 2),
    "llama3-70b": (4, 8),
    "qwen3-30b-a3b": (1, 2),
    "qwen3-32b": (1, 2),
}
HOPPER_AND_AMPERE = ("a100", "h100", "h200")
SERVING_SIM = {  # (model, GPU): its names of the two, and its TP degrees
    ("llama3-8b", "rtxpro6000"): ("RTXPRO6000", "Llama-3.1-8B", (1, 2)),
    ("qwen3-32b", "rtxpro6000"): ("RTXPRO6000", "Qwen3-32B", (1, 2)),
    ("qwen3-30b-a3b", "rtxpro6000"): ("RTXPRO6000", "Qwen3-30B-A3B-Instruct-2507", (1,)),
    ("llama3-8b", "rtx4090"): ("RTX4090", "Llama-3.1-8B", (1,)),
}
VIDUR_A100 = {"llama3-70b": "vidur_a100_llama3_70b_ops_median.csv"}
VIDUR_A100_ELSE = ("llama3-8b", "vidur_a100_llama3_8b_ops_median.csv")
SERVING_TABLES = ("dense_ops.csv.gz", "attention.csv.gz", "moe.csv", "per_sequence_ops.csv")

A800_FACTOR = 1.03  # the real run's idle TTFTs over the operators of an A100
A800_LINK = 1.5  # NVLink of an A100 over that of an A800: 600 to 400 GB/s


@dataclass(frozen=True)
class Made:
    """A profile, its text and what was said while it was made."""

    profile: dict[str, Any]
    text: str
    notes: list[str]


def data_folder() -> Path:
    """The folder of measured data: FLOWSIM_DATA, else `../shared/data` beside the checkout."""
    return Path(os.environ.get("FLOWSIM_DATA") or CHECKOUT / "../shared/data")


def needed_files(model: str, gpu: str) -> list[str]:
    """The files of the data folder that a profile is made from."""
    if gpu in ("a100", "a800"):
        return [VIDUR_A100.get(model, VIDUR_A100_ELSE[1])]
    return [f"llmservingsim_{name}" for name in SERVING_TABLES] if (model, gpu) in SERVING_SIM else []


def everything() -> list[tuple[str, str]]:
    """(model, GPU) of every shipped profile, in a fixed order."""
    made = [(model, gpu) for model in DEGREES for gpu in (*HOPPER_AND_AMPERE, "a800")]
    return [*made, *SERVING_SIM]


def make(model: str, gpu: str, data: Path, report: Path | None = None) -> Made:
    """Imports and fits one profile; ValueError for a table that is missing or not understood."""
    notes: list[str] = []
    if gpu == "a800":
        return a800(model, make(model, "a100", data))
    trace = _serving_sim(model, gpu, data, notes) if (model, gpu) in SERVING_SIM else _package(model, gpu, data, notes)
    trace = validate(trace, f"{model}/{gpu}")
    profile, fits = build_profile(
        trace,
        load_shapes(model),
        gpu_memory_bytes=load_gpu(gpu).memory_bytes,
        overheads=default_overheads(gpu, has_lm_head="lm_head" in set(trace["operator"])),
        note=notes.append,
    )
    if report is not None:
        write_report(profile, fits, trace, report / model / gpu)
    profile["notes"] = [note for note in dict.fromkeys(notes) if "left out" not in note]
    return Made(profile, render(profile, f"{COMMAND} --only {model}/{gpu}"), notes)


def a800(model: str, a100: Made) -> Made:
    """An A800's profile: the operators of an A100 times 1.03, all-reduces over a narrower link besides."""
    profile = copy.deepcopy(a100.profile)
    overheads = default_overheads("a800", has_lm_head=False)
    profile["gpu"] = "a800"
    profile["overheads"] = {key: getattr(overheads, key) for key in profile["overheads"]}
    profile["overheads_source"] = overheads.source
    for degree in profile["tp"].values():
        for entry in degree["operators"]:
            _scale(entry)
    return Made(profile, render(profile, f"{COMMAND} --only {model}/a800"), [])


def _scale(entry: dict[str, Any]) -> None:
    """Makes an A100's operator an A800's: every second times 1.03, and those of an all-reduce's bytes times 1.5."""
    link = A800_LINK if entry["kind"] == "all_reduce" else 1.0
    for key in ("constant_s", "expert_s"):
        if key in entry:
            entry[key] = _rounded(A800_FACTOR * entry[key])
    if "slopes_s_per_token" in entry:
        entry["slopes_s_per_token"] = [_rounded(A800_FACTOR * link * slope) for slope in entry["slopes_s_per_token"]]
    if "coefficients" in entry:
        entry["coefficients"] = {name: _rounded(A800_FACTOR * value) for name, value in entry["coefficients"].items()}
    entry["source"] += f", times {A800_FACTOR} for an A800"
    if link != 1.0:
        entry["source"] += f", its bytes times {A800_LINK} besides (NVLink of 400 GB/s, assumed)"


def _package(model: str, gpu: str, data: Path, notes: list[str]) -> pd.DataFrame:
    frames = []
    for tp in DEGREES[model]:
        choices = Choices()
        if gpu == "a100":
            measured = model if model in VIDUR_A100 else VIDUR_A100_ELSE[0]
            table = data / VIDUR_A100.get(model, VIDUR_A100_ELSE[1])
            choices = Choices(elementwise=table, measured=load_shapes(measured).rank(tp))
        tables = PerfTables(str(load_gpu(gpu).system), "vllm")
        frames.append(
            import_aiconfigurator(
                tables,
                load_shapes(model).rank(tp),
                load_gpu(gpu),
                choices,
                partial(_tell, notes, tp),
            )
        )
    return pd.concat(frames, ignore_index=True)


def _serving_sim(model: str, gpu: str, data: Path, notes: list[str]) -> pd.DataFrame:
    their_gpu, their_model, degrees = SERVING_SIM[(model, gpu)]
    dense, attention, moe, per_sequence = (data / f"llmservingsim_{name}" for name in SERVING_TABLES)
    shapes = load_shapes(model)
    files = Files(dense=dense, attention=attention, moe=moe if shapes.experts else None, per_sequence=per_sequence)
    frames = []
    for tp in degrees:
        origin = Origin(
            model=model, gpu=gpu, tp=tp, statistic="mean", software="vLLM 0.19 kernels, LLMServingSim profiler"
        )
        frames.append(
            import_llmservingsim(
                origin,
                shapes.rank(tp),
                files,
                names=(their_gpu, their_model),
                link=Link(),
                note=partial(_tell, notes, tp),
            )
        )
    return pd.concat(frames, ignore_index=True)


def _tell(notes: list[str], tp: int, note: str) -> None:
    notes.append(f"tp {tp}: {note}")


def _rounded(value: float) -> float:
    return float(f"{value:.7g}")


def _make_file(job: tuple[str, str, Path, Path | None]) -> Made:
    return make(*job)


def _print_made(model: str, gpu: str, made: Made) -> None:
    for note in made.notes:
        print(f"{model}/{gpu}: {note}", file=sys.stderr)
    for tp, degree in made.profile["tp"].items():
        errors = [entry["fit"] for entry in degree["operators"] if "fit" in entry]
        worst = max(errors, key=lambda fit: fit["heldout_mape"])
        sums = "  ".join(f"{1e3 * pass_seconds(made.profile, tp, n):8.1f}" for n in (512, 2048, 8192))
        mean = sum(fit["heldout_mape"] for fit in errors) / len(errors)
        held_out = f"mean {100 * mean:4.1f} %  worst {100 * worst['heldout_mape']:4.1f} %"
        print(f"{model:14} {gpu:11} tp {tp}  {sums} ms  {held_out}")


def main() -> None:
    """Makes all profiles, or those named; prints prefill sums at 512, 2048 and 8192 tokens and held-out errors."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="MODEL/GPU", help="these profiles only")
    parser.add_argument("--report", type=Path, help="also write a fit report for each into this folder")
    options = parser.parse_args()
    data = data_folder()
    wanted = [tuple(one.split("/")) for one in options.only] if options.only else everything()
    missing = sorted({name for pair in wanted for name in needed_files(*pair) if not (data / name).is_file()})
    if missing:
        sys.exit(f"No {', '.join(missing)} in {data}. Set FLOWSIM_DATA to the folder of measured data.")
    fitted = list(dict.fromkeys((model, "a100" if gpu == "a800" else gpu) for model, gpu in wanted))
    with ProcessPoolExecutor() as pool:
        jobs = [(*pair, data, options.report) for pair in fitted]
        made = dict(zip(fitted, pool.map(_make_file, jobs), strict=True))
    for model, gpu in wanted:
        one = a800(model, made[(model, "a100")]) if gpu == "a800" else made[(model, gpu)]
        path = PROFILES / model / f"{gpu}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(one.text, encoding="utf-8")
        _print_made(model, gpu, one)


if __name__ == "__main__":
    main()
