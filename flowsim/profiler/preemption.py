"""What stopping costs: whole prefills with a check at every boundary against free ones, and a prefill that pauses.

Needs torch (extra `profiler`). Knows the model and the simulator's timelines; fits nothing.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate

import numpy as np
import torch

from flowsim.profiler.bench import Bench
from flowsim.profiler.grid import Point
from flowsim.profiler.layer import Model, Work
from flowsim.profiler.operators import needed_bytes
from flowsim.profiler.recording import Recording
from flowsim.profiler.timing import free_bytes, synchronize
from flowsim.timeline import OPERATORS, Pass, Stops, Timeline

__all__ = ["Cost", "Trial", "check_cost", "measured_timeline", "pauses"]

CHECKED = (Stops.OPERATOR, Stops.BLOCK, Stops.LAYER)
ROUNDS = 15  # of one free and three checked prefills each
WARM_UPS = 2
CALIBRATIONS = 5
MOST_ATTEMPTS = 10  # prefills for each pause wanted: some end before the flag is raised


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What checks at one granularity add to a prefill of `tokens`; medians over rounds, `iqr_s` of the difference."""

    tokens: int
    stops: str
    checkpoints: int
    free_s: float
    checked_s: float
    added_s: float
    iqr_s: float

    @property
    def share(self) -> float:
        """Of the free prefill."""
        return self.added_s / self.free_s

    @property
    def check_s(self) -> float:
        """Seconds a checkpoint; never below 0."""
        return max(0.0, self.added_s) / self.checkpoints


def check_cost(bench: Bench, prompts: Sequence[int], recording: Recording | None) -> list[Cost]:
    """Times whole prefills, prints a table, writes it beside the trace as JSON, and appends rows to it.

    A row `whole_prefill` holds the free prefill, `check_sync_operator`, `_block` and `_layer` the whole prefill that
    synchronises there. All are wall-clock medians; the profile's `check_s` is the suggested figure.
    """
    costs = []
    for tokens in prompts:
        if not _fits(bench, tokens):
            bench.say(f"--check-cost leaves out {tokens} tokens: more than memory or the model's context takes")
            continue
        times_s = _rounds(bench, tokens)
        costs += [_cost(bench, tokens, stops, times_s) for stops in CHECKED]
        if recording is not None:
            for stops, values in times_s.items():
                name = f"check_sync_{stops.value}" if stops in CHECKED else "whole_prefill"
                _append(recording, Point(name, tokens), values)
    if recording is not None and costs:
        _report(bench, costs, recording)
    return costs


def suggested_check_s(costs: Sequence[Cost]) -> float:
    """The median over prompt lengths of a checkpoint's cost, at operator granularity."""
    return float(np.median([cost.check_s for cost in costs if cost.stops == "operator"]))


@contextmanager
def started(bench: Bench, tokens: int) -> Iterator[tuple[Work, torch.Tensor]]:
    """A prompt of random tokens, and the work that a prefill of it needs."""
    with torch.inference_mode():
        prompt = bench.model.draw.below(bench.model.embedding.shape[0], 1, tokens)
        yield bench.model.start(prompt), prompt


def checker(stops: Stops, device: torch.device, flag: threading.Event) -> Callable[[str], None] | None:
    """What an engine does at each boundary: wait for the device, look at the flag."""
    places = {OPERATORS[index] for index in stops.operators}

    def at_end(name: str) -> None:
        if name in places:
            synchronize(device)
            flag.is_set()

    return at_end if places else None


def measured_timeline(bench: Bench, tokens: int) -> Timeline:
    """The timeline of a prefill that stops at every operator, from the times between its boundaries on this device.

    What the simulator would build from a profile without fit error; medians over layers and runs.
    """
    durations: dict[str, list[float]] = {name: [] for name in OPERATORS}
    firsts, tails = [], []
    with started(bench, tokens) as (work, prompt):
        for run in range(WARM_UPS + CALIBRATIONS):
            ends_s = [time.perf_counter()]

            def at_end(_: str, ends_s: list[float] = ends_s) -> None:
                synchronize(bench.device)
                ends_s.append(time.perf_counter())

            bench.model.prefill(work, prompt, at_end)
            at_end("tail")
            if run < WARM_UPS:
                continue
            steps = np.diff(ends_s)
            firsts.append(float(steps[0]))
            tails.append(float(steps[-1]))
            for index, step_s in enumerate(steps[1:-1], start=1):
                durations[OPERATORS[index % len(OPERATORS)]].append(float(step_s))
    medians_s = [float(np.median(durations[name] or firsts)) for name in OPERATORS]
    head_s = max(0.0, float(np.median(firsts)) - medians_s[0])
    first, second, third, fourth, fifth = accumulate(medians_s)
    ends = (first, second, third, fourth, fifth)
    return Timeline([Pass(tokens, head_s, ends, bench.model.shapes.layers, float(np.median(tails)))])


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One pause: when the flag was raised (from the prefill's start), and how long until it was acknowledged."""

    raised_s: float
    blocked_s: float
    unchanged: bool
    """Whether the prefill, paused for another one and resumed, ended as it does undisturbed."""


def pauses(bench: Bench, tokens: int, stops: Stops, trials: int, *, urgent_tokens: int, seed: int = 0) -> list[Trial]:
    """Prefills paused at random times by another thread, which then runs an urgent prefill and resumes them.

    A worker thread (on a GPU with its own stream) prefills, and looks at a flag where `stops` allows. The calling
    thread raises the flag, waits for the acknowledgement, runs the urgent prompt on its own stream, and lets the
    worker go on from the same boundary with its activations and KV.
    """
    draws = random.Random(seed)
    stream = torch.cuda.Stream(bench.device) if bench.device.type == "cuda" else None
    found: list[Trial] = []
    with started(bench, tokens) as (work, prompt), started(bench, urgent_tokens) as (urgent, urgent_prompt):
        for _ in range(WARM_UPS):
            began_s = time.perf_counter()
            expected = bench.model.prefill(work, prompt, checker(stops, bench.device, threading.Event()))
            synchronize(bench.device)
        whole_s, expected_x = time.perf_counter() - began_s, work.x.clone()
        bench.model.prefill(urgent, urgent_prompt)
        synchronize(bench.device)
        for _ in range(MOST_ATTEMPTS * trials):
            if len(found) == trials:
                break
            worker = _Worker(bench.model, stream, work, prompt, stops)
            worker.start()
            time.sleep(draws.uniform(0.0, whole_s))
            raised_s = worker.pause()
            bench.model.prefill(urgent, urgent_prompt)
            synchronize(bench.device)
            output = worker.resume()
            unchanged = bool(torch.equal(output, expected) and torch.equal(work.x, expected_x))
            blocked_s = worker.acknowledged_s - raised_s
            if blocked_s > 0.0:  # else it had ended before the flag was raised, and nothing was blocked
                found.append(Trial(raised_s=raised_s - worker.began_s, blocked_s=blocked_s, unchanged=unchanged))
    if not found:
        raise ValueError(f"a prefill of {tokens} tokens ends before a flag can be raised; give a longer one")
    return found


class _Worker:
    """Prefills in a thread of its own; parks at the first legal boundary after the flag is raised."""

    def __init__(
        self, model: Model, stream: torch.cuda.Stream | None, work: Work, prompt: torch.Tensor, stops: Stops
    ) -> None:
        self._model, self._stream, self._work, self._prompt = model, stream, work, prompt
        self._places = {OPERATORS[index] for index in stops.operators}
        self._flag, self._acknowledged, self._go_on = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._run)
        self._output: torch.Tensor | None = None
        self._failure: BaseException | None = None
        self.began_s = self.acknowledged_s = 0.0

    def start(self) -> None:
        """Begins, and waits until it has."""
        begun = threading.Event()
        self._begun = begun
        self._thread.start()
        begun.wait()

    def pause(self) -> float:
        """Raises the flag and waits for the acknowledgement; answers when it was raised."""
        raised_s = time.perf_counter()
        self._flag.set()
        self._acknowledged.wait()
        return raised_s

    def resume(self) -> torch.Tensor:
        """Lets the prefill go on, waits for its end, and answers its tokens; raises what the thread raised."""
        self._go_on.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._output is not None, "a prefill without an output"
        return self._output

    def _run(self) -> None:
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream):  # of None: no stream is changed
                self.began_s = time.perf_counter()
                self._begun.set()
                self._output = self._model.prefill(self._work, self._prompt, self._at_end)
                self._wait()
        except BaseException as failure:  # handed to the thread that waits for it
            self._failure = failure
        finally:
            self._begun.set()
            if not self._acknowledged.is_set():  # the prefill ended first: its end is the acknowledgement
                self._acknowledge()

    def _at_end(self, name: str) -> None:
        if name not in self._places:
            return
        self._wait()
        if self._flag.is_set() and not self._acknowledged.is_set():
            self._acknowledge()
            self._go_on.wait()

    def _acknowledge(self) -> None:
        self.acknowledged_s = time.perf_counter()
        self._acknowledged.set()

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _fits(bench: Bench, tokens: int) -> bool:
    """Whether all ranks can prefill a prompt of that length."""
    shapes, rank = bench.model.shapes, bench.model.rank
    caches = shapes.layers * tokens * 2 * rank.kv_heads * shapes.head_dim * int(bench.model.draw.dtype.itemsize)
    needed = needed_bytes(bench.model, Point("whole_layer", tokens)) + caches
    return not bench.ranks.any(needed > free_bytes(bench.device) or tokens > shapes.max_context_tokens)


def _rounds(bench: Bench, tokens: int) -> dict[Stops, list[float]]:
    """Wall-clock seconds of whole prefills, free (REQUEST) and checked, taking turns; the slowest rank's."""
    flag = threading.Event()
    times_s: dict[Stops, list[float]] = {stops: [] for stops in (Stops.REQUEST, *CHECKED)}
    with started(bench, tokens) as (work, prompt):
        for turn in range(WARM_UPS + ROUNDS):
            for stops, found in times_s.items():
                bench.ranks.meet()
                synchronize(bench.device)
                began_s = time.perf_counter()
                bench.model.prefill(work, prompt, checker(stops, bench.device, flag))
                synchronize(bench.device)
                (elapsed_s,) = bench.ranks.slowest([time.perf_counter() - began_s])
                if turn >= WARM_UPS:
                    found.append(elapsed_s)
    return times_s


def _cost(bench: Bench, tokens: int, stops: Stops, times_s: dict[Stops, list[float]]) -> Cost:
    added = np.subtract(times_s[stops], times_s[Stops.REQUEST])
    low, middle, high = np.percentile(added, [25, 50, 75])
    return Cost(
        tokens=tokens,
        stops=stops.value,
        checkpoints=len(stops.operators) * bench.model.shapes.layers,
        free_s=float(np.median(times_s[Stops.REQUEST])),
        checked_s=float(np.median(times_s[stops])),
        added_s=float(middle),
        iqr_s=float(high - low),
    )


def _append(recording: Recording, point: Point, times_s: list[float]) -> None:
    if point in recording.done:
        return
    low, middle, high = np.percentile(times_s, [10, 50, 90])
    values = {"latency_s": float(middle), "p10_s": float(low), "p90_s": float(high), "repetitions": len(times_s)}
    recording.append(point, values)


def _report(bench: Bench, costs: list[Cost], recording: Recording) -> None:
    print(" tokens  check at checks   free ms  added ms   IQR ms   share check_s")
    for cost in costs:
        print(
            f"{cost.tokens:>7} {cost.stops:>9} {cost.checkpoints:>6} {1e3 * cost.free_s:>9.3f} "
            f"{1e3 * cost.added_s:>9.3f} {1e3 * cost.iqr_s:>8.3f} {cost.share:>7.2%} {cost.check_s:.2e}"
        )
    check_s = suggested_check_s(costs)
    print(f"suggested check_s: {check_s:.2e}")
    rows = [asdict(cost) | {"share": cost.share, "check_s": cost.check_s} for cost in costs]
    path = recording.path.with_suffix(".checks.json")
    found = {**bench.identity, "distinct_layers": len(bench.model.layers), "check_s": check_s, "costs": rows}
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
