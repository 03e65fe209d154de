"""`python -m flowsim.profiler pause`: prefills paused at random times, and their blocking against what was predicted.

A sub-command like `collect`: `configure(parser)` and `run(options)`; torch is imported in `run` only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowsim.latency import LatencyModel
from flowsim.profile import read_profile
from flowsim.profiler.collect import NO_TORCH, add_device_arguments, device_options, say, shapes_of
from flowsim.timeline import Stops, Timeline

if TYPE_CHECKING:
    from flowsim.profiler.preemption import Trial

__all__ = ["configure", "run"]

LEGAL = ("operator", "block", "layer")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `pause`."""
    add_device_arguments(parser)
    parser.add_argument("--profile", type=Path, help="a fitted profile (.yaml) to predict the blocking times with")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the paused prompt (default: 2048)")
    parser.add_argument("--urgent-tokens", type=int, default=256, help="of the one run meanwhile (default: 256)")
    parser.add_argument("--stops", choices=LEGAL, nargs="+", default=list(LEGAL), help="where it may stop")
    parser.add_argument("--trials", type=int, default=100, help="pauses at each granularity (default: 100)")
    parser.add_argument("--out", type=Path, help="write all trials and the table as JSON")


def run(options: argparse.Namespace) -> int:
    """Runs the trials and prints a table of blocking times in milliseconds.

    Raises:
        ValueError: no torch, several processes, a profile or a device that is not to be had.
    """
    try:
        from flowsim.profiler.bench import open_bench
        from flowsim.profiler.preemption import measured_timeline, pauses
    except ImportError as error:
        if error.name != "torch":
            raise
        raise ValueError(NO_TORCH) from error
    shapes = shapes_of(options)
    fitted = None if options.profile is None else _timelines(options.profile, options.tp, options.tokens)
    bench = open_bench(shapes, **device_options(options), layers=shapes.layers, say=say)
    if bench.ranks.world > 1:
        raise ValueError("pause runs in one process; start it without torchrun")
    measured = measured_timeline(bench, options.tokens)
    rows, found = [], {}
    for name in options.stops:
        stops = Stops(name)
        trials = pauses(bench, options.tokens, stops, options.trials, urgent_tokens=options.urgent_tokens)
        predicted = {"operators": residuals_s(measured, stops, trials)}
        if fitted is not None:
            predicted["profile"] = residuals_s(fitted[name], stops, trials)
        rows += _rows(name, trials, predicted)
        found[name] = [
            {"raised_s": trial.raised_s, "blocked_s": trial.blocked_s, "unchanged": trial.unchanged}
            | {f"predicted_{key}_s": values[place] for key, values in predicted.items()}
            for place, trial in enumerate(trials)
        ]
        _print_unchanged(name, trials)
    _print(rows)
    if options.out is not None:
        report = {**bench.identity, "tokens": options.tokens, "table": rows, "trials": found}
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def residuals_s(timeline: Timeline, stops: Stops, trials: Sequence[Trial]) -> list[float]:
    """For each trial what the simulator says: the time from the flag to the next legal stop of the timeline."""
    raised_s = (min(trial.raised_s, timeline.total_s) for trial in trials)
    return [timeline.next_stop(at_s, stops).at_s - at_s for at_s in raised_s]


def _timelines(path: Path, tp: int, tokens: int) -> dict[str, Timeline]:
    """The fitted profile's timelines of one pass; the engine's overheads outside the GPU are left out."""
    profile = replace(read_profile(path), pass_s=0.0, request_s=0.0)
    return {
        name: LatencyModel(profile, tp, pass_tokens=tokens, stops=Stops(name)).timeline([(tokens, 0)]) for name in LEGAL
    }


def _rows(name: str, trials: Sequence[Trial], predicted: dict[str, list[float]]) -> list[dict[str, Any]]:
    series = {"measured": [trial.blocked_s for trial in trials]} | predicted
    rows = []
    for what, values_s in series.items():
        p50, p90, p99 = np.percentile(values_s, [50, 90, 99])
        figures = {"mean_s": float(np.mean(values_s)), "p50_s": float(p50), "p90_s": float(p90), "p99_s": float(p99)}
        rows.append({"stops": name, "what": what, **figures, "max_s": float(max(values_s))})
    return rows


def _print(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'stops':>9} {'blocking':>10} {'mean ms':>9} {'p50 ms':>9} {'p90 ms':>9} {'p99 ms':>9} {'max ms':>9}")
    for row in rows:
        times = " ".join(f"{1e3 * row[key]:>9.3f}" for key in ("mean_s", "p50_s", "p90_s", "p99_s", "max_s"))
        print(f"{row['stops']:>9} {row['what']:>10} {times}")


def _print_unchanged(name: str, trials: Sequence[Trial]) -> None:
    count = sum(trial.unchanged for trial in trials)
    print(f"{name}: {count} of {len(trials)} paused prefills ended exactly as undisturbed ones")
