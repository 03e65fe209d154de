"""`python -m flowsim.profiler collect`: times a model's operators on this machine's GPU (or CPU) into a trace.

A sub-command: `configure(parser)` adds its arguments, `run(options)` does the work and answers the exit status.
torch is imported in `run` only, so that the other sub-commands work without it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowsim.profiler.grid import GRIDS, Point, points
from flowsim.profiler.models import Shapes, load_shapes
from flowsim.profiler.recording import Recording

if TYPE_CHECKING:
    from flowsim.profiler.bench import Bench

__all__ = ["add_device_arguments", "configure", "device_options", "run", "say", "shapes_of"]

NO_TORCH = "torch is not installed; run: pip install 'flowsim-prefill[profiler]'"
PREFILL_TOKENS = {"full": (512, 2048, 8192), "small": (64, 256)}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `collect`."""
    add_device_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="the trace to write or to go on with, a .csv file")
    parser.add_argument("--minutes", type=float, default=10.0, help="time budget of the grid (default: 10)")
    parser.add_argument("--grid", choices=sorted(GRIDS), default="full", help="which token counts (default: full)")
    parser.add_argument("--max-tokens", type=int, help="largest pass and context to measure (default: the grid's)")
    parser.add_argument("--spread", type=float, default=0.01, help="repeat until the median's error is below this")
    parser.add_argument("--check-cost", action="store_true", help="also time whole prefills with and without stops")
    parser.add_argument("--prefill-tokens", type=int, nargs="+", help="prompt lengths of --check-cost")


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what names a model and a device."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="a shipped model, such as llama3-8b")
    which.add_argument("--config", type=Path, help="the config.json of a Hugging Face model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--gpu", default="", help="name of the device in the trace (default: its own)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="", help="default: bf16, on a CPU fp32")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument("--tp", type=int, default=1, help="measure one rank of so many; under torchrun all of them")


def shapes_of(options: argparse.Namespace) -> Shapes:
    """The shapes that --model or --config names; ValueError as `load_shapes`."""
    return load_shapes(options.model or str(options.config))


def device_options(options: argparse.Namespace) -> dict[str, Any]:
    """What `open_bench` needs of the arguments."""
    return {name: getattr(options, name) for name in ("device", "dtype", "tp", "gpu", "threads")}


def run(options: argparse.Namespace) -> int:
    """Measures; answers 0, or 130 after Ctrl-C, with everything measured so far on disk.

    Raises:
        ValueError: no torch, or what `open_bench` and `Recording` refuse.
    """
    try:
        from flowsim.profiler.bench import open_bench
    except ImportError as error:
        if error.name != "torch":
            raise
        raise ValueError(NO_TORCH) from error
    try:
        shapes = shapes_of(options)
        limit = options.max_tokens or max(GRIDS[options.grid].tokens)
        grid = GRIDS[options.grid].upto(limit)
        layers = shapes.layers if options.check_cost else 1
        bench = open_bench(shapes, **device_options(options), layers=layers, say=say)
        return _collect(bench, options, points(bench.operators, grid, min(limit, shapes.max_context_tokens)))
    except KeyboardInterrupt:
        say(f"interrupted; the same command goes on with {options.out}")
        return 130


def _collect(bench: Bench, options: argparse.Namespace, wanted: list[Point]) -> int:
    from flowsim.profiler.measuring import measure_points
    from flowsim.profiler.preemption import check_cost

    recording = Recording(options.out, bench.identity, bench.say) if bench.ranks.rank == 0 else None
    if bench.model.rank.tp > 1 and bench.ranks.world == 1:
        bench.say(f"one process: no all-reduce; run it under torchrun --nproc-per-node {options.tp} to measure it")
    deadline_s = time.monotonic() + 60.0 * options.minutes
    with _progress(bench) as progress:
        count = measure_points(bench, wanted, recording, deadline_s, options.spread, progress)
    if options.check_cost:
        check_cost(bench, options.prefill_tokens or PREFILL_TOKENS[options.grid], recording)
    bench.ranks.close()
    if recording is not None:
        name = "{model} on {gpu}, tp {tp}".format(**bench.identity)
        print(f"{name}: {len(recording.done)} points in {options.out}; {count.skipped} skipped, {count.left} left")
        if count.left:
            bench.say(f"the time budget ended first; the same command measures the {count.left} points left")
    return 0


def _progress(bench: Bench) -> AbstractContextManager[Callable[[int, int, str], None]]:
    """What shows points done, points wanted and the point under way, with the time to go, on stderr."""
    return nullcontext(lambda *_: None) if bench.ranks.rank else _Progress()


class _Progress:
    """rich's progress bar, as a callable."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description:<36}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Callable[[int, int, str], None]:
        self._bar.start()
        return lambda done, total, text: self._bar.update(self._task, completed=done, total=total, description=text)

    def __exit__(self, *failure: object) -> None:
        self._bar.stop()


def say(sentence: str) -> None:
    """Tells the user something, on stderr; under torchrun the first process speaks for all."""
    if os.environ.get("RANK", "0") == "0":
        print(f"flowsim.profiler: {sentence}", file=sys.stderr)
