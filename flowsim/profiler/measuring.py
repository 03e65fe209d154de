"""The loop of a collection: each point prepared, timed within its share of the budget, and appended.

Needs torch (extra `profiler`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flowsim.profiler.bench import Bench
from flowsim.profiler.grid import Point
from flowsim.profiler.operators import Prepared, needed_bytes, prepare
from flowsim.profiler.recording import Recording
from flowsim.profiler.timing import Timer, Timing, free_bytes, is_out_of_memory, synchronize

__all__ = ["Count", "measure_points"]

SHARE = 3.0
"""How many equal shares of the time left one point may take; most need less than one."""
SPIN_S = 1.0
"""A GPU works so long before the first point, to leave its idle clocks."""


@dataclass(slots=True)
class Count:
    """What became of the points: measured now, skipped for lack of memory, left when the time was up."""

    measured: int = 0
    skipped: int = 0
    left: int = 0


def measure_points(
    bench: Bench,
    wanted: list[Point],
    recording: Recording | None,
    deadline_s: float,
    spread: float,
    progress: Callable[[int, int, str], None],
) -> Count:
    """Times the points that the recording lacks, in order, until `deadline_s` on the monotonic clock.

    `recording` is None on all ranks but the first. A point that does not fit in memory is skipped, and said.
    """
    todo = _same_on_all_ranks(bench, [one for one in wanted if recording is None or one not in recording.done])
    timer, count = Timer(bench.device, bench.ranks, spread=spread), Count()
    if todo:
        _spin(bench)
    for place, point in enumerate(todo):
        left_s = deadline_s - time.monotonic()
        if bench.ranks.any(left_s <= 0.0):
            count.left = len(todo) - place
            break
        progress(len(wanted) - len(todo) + place, len(wanted), _text(point))
        measured = _measure(bench, point, timer, SHARE * left_s / (len(todo) - place))
        if measured is None:
            count.skipped += 1
            continue
        count.measured += 1
        if recording is not None:
            timing, experts = measured
            recording.append(point, _values(timing) | {"experts": experts})
    progress(len(wanted) - count.left, len(wanted), "")
    return count


def _measure(bench: Bench, point: Point, timer: Timer, budget_s: float) -> tuple[Timing, int] | None:
    """The point's timing and the experts it touched; None where it does not fit on some rank."""
    needed, free = needed_bytes(bench.model, point), free_bytes(bench.device)
    if bench.ranks.any(needed > free):
        _skip(bench, point, f"needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
        return None
    try:
        with torch.inference_mode():
            prepared: Prepared = prepare(bench.model, point)
            return timer.measure(prepared.call, budget_s), prepared.experts
    except RuntimeError as error:
        if bench.ranks.world > 1 or not is_out_of_memory(error):
            raise
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    _skip(bench, point, "the device ran out of memory")
    return None


def _skip(bench: Bench, point: Point, reason: str) -> None:
    if bench.ranks.rank == 0:
        bench.say(f"skipped {_text(point)}: {reason}")


def _values(timing: Timing) -> dict[str, float | int]:
    return {
        "latency_s": timing.median_s,
        "p10_s": timing.p10_s,
        "p90_s": timing.p90_s,
        "repetitions": timing.repetitions,
    }


def _text(point: Point) -> str:
    if point.sequences:
        return f"{point.operator}, {point.sequences} sequences"
    many = f"{point.batch} x " if point.batch > 1 else ""
    return f"{point.operator}, {many}{point.new_tokens} tokens" + (
        f" + {point.cached_tokens}" * bool(point.cached_tokens)
    )


def _same_on_all_ranks(bench: Bench, todo: list[Point]) -> list[Point]:
    """The first rank's list: it alone reads the file."""
    if bench.ranks.world == 1:
        return todo
    shared = [todo]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _spin(bench: Bench) -> None:
    if bench.device.type != "cuda":
        return
    square = torch.ones(4096, 4096, device=bench.device, dtype=bench.model.draw.dtype)
    end_s = time.monotonic() + SPIN_S
    while time.monotonic() < end_s:
        torch.mm(square, square)
        synchronize(bench.device)
