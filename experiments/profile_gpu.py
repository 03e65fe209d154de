"""Profiles one model on this machine's GPU, from nothing to a profile, a report and what preemption costs there.

    python -m experiments.profile_gpu --model llama3-8b --out results/h200

Takes about six minutes of GPU time and writes to the folder: trace.csv (the measured operators), trace.checks.json
(what stopping costs), profile.yaml (`gpu=results/h200/profile.yaml`), report/ (how good the fit is), pause.json
(blocking times of real pauses) and device.json. Run again after an interruption, it goes on with trace.csv.
`--device cpu --config config.json --grid small --minutes 1` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

from flowsim.profiler.__main__ import main as profiler
from flowsim.profiler.collect import add_device_arguments
from flowsim.profiler.grid import GRIDS

CPU_MEMORY_BYTES = 2**34


def main(arguments: list[str] | None = None) -> int:
    """Runs all steps; answers the first exit status that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_device_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is written")
    parser.add_argument("--minutes", type=float, default=4.0, help="budget of the operator grid (default: 4)")
    parser.add_argument("--grid", choices=sorted(GRIDS), default="full")
    parser.add_argument("--pause-tokens", type=int, default=2048, help="length of the paused prompts")
    parser.add_argument("--pause-trials", type=int, default=100, help="pauses at each granularity")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    trace, profile = options.out / "trace.csv", options.out / "profile.yaml"
    device = _device(options)

    collected = [*device, "--grid", options.grid, "--minutes", options.minutes, "--check-cost", "--out", trace]
    if status := _run("collect", *collected):
        return status
    costs = json.loads(trace.with_suffix(".checks.json").read_text(encoding="utf-8"))
    memory_bytes = _describe(options)
    fitted = [trace, "--out", profile, "--report", options.out / "report", "--check-s", costs["check_s"]]
    shapes = ["--config", options.config] if options.config else []
    if status := _run("fit", *fitted, *shapes, "--gpu-memory-bytes", memory_bytes):
        return status
    pauses = ["--tokens", options.pause_tokens, "--trials", options.pause_trials, "--profile", profile]
    return _run("pause", *device, *pauses, "--out", options.out / "pause.json")


def _device(options: argparse.Namespace) -> list[object]:
    named = ["model", "config", "device", "gpu", "dtype", "threads", "tp"]
    return [word for name in named if getattr(options, name) for word in (f"--{name}", getattr(options, name))]


def _describe(options: argparse.Namespace) -> int:
    """Writes device.json; the memory of the device in bytes."""
    import torch

    found: dict[str, object] = {"torch": torch.__version__, "python": platform.python_version()}
    memory_bytes = CPU_MEMORY_BYTES
    if options.device == "cuda":
        its = torch.cuda.get_device_properties(0)
        memory_bytes = int(its.total_memory)
        found |= {"name": its.name, "cuda": torch.version.cuda, "multiprocessors": its.multi_processor_count}
    found["memory_bytes"] = memory_bytes
    (options.out / "device.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return memory_bytes


def _run(*command: object) -> int:
    words = [str(word) for word in command]
    print("python -m flowsim.profiler", *words, file=sys.stderr)
    return profiler(words)


if __name__ == "__main__":
    sys.exit(main())
