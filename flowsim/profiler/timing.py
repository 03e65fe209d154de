"""How long a call takes on a device: warm-up, cold caches, repetition until the median is steady, ranks in step.

Needs torch (extra `profiler`). Knows devices and clocks; knows no operator.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

__all__ = ["Ranks", "Timer", "Timing", "free_bytes", "is_out_of_memory", "synchronize"]

FEWEST = 5  # repetitions of every point, whatever the budget
FEWEST_STEADY = 10  # before the spread is believed
MOST = 200
WARM_UPS = 3
BLOCK = 5  # repetitions between two looks at the spread
FLUSH_BYTES = {"cuda": 2**30, "cpu": 32 * 2**20}
"""Written between repetitions, larger than the last cache; it also keeps a GPU busy until the call is queued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one call over its repetitions: median, 10th and 90th percentile; the slowest rank of each."""

    median_s: float
    p10_s: float
    p90_s: float
    repetitions: int


class Ranks:
    """The processes that measure together, one GPU each: torchrun's, or this one alone."""

    def __init__(self, device: torch.device) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self._device = device
        if self.world > 1:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            self._token = torch.zeros(1, device=device)

    def slowest(self, values: list[float]) -> list[float]:
        """The maximum over the ranks of each value."""
        if self.world == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor.tolist()]

    def any(self, claim: bool) -> bool:
        """Whether the claim holds on any rank, so that all ranks decide alike."""
        return self.slowest([float(claim)])[0] > 0.0

    def meet(self) -> None:
        """The ranks wait for one another, on a GPU in its stream: what follows starts together."""
        if self.world > 1:
            dist.all_reduce(self._token)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums the tensor over the ranks in place; alone, nothing happens."""
        if self.world > 1:
            dist.all_reduce(tensor)

    def close(self) -> None:
        """Ends the process group."""
        if self.world > 1:
            dist.destroy_process_group()


class Timer:
    """Times calls on one device.

    Args:
        device: CUDA events time a GPU, `perf_counter` a CPU.
        ranks: who measures together; each repetition counts as its slowest rank.
        spread: repeats until the standard error of the median, from the quartiles, is below this share of it.
    """

    def __init__(self, device: torch.device, ranks: Ranks, *, spread: float = 0.01, flush_bytes: int = 0) -> None:
        self._device = device
        self._ranks = ranks
        self._spread = spread
        size = flush_bytes or FLUSH_BYTES[device.type]
        self._flush = torch.empty(size, dtype=torch.int8, device=device)

    def measure(self, call: Callable[[], object], budget_s: float) -> Timing:
        """Repeats the call, caches flushed before each, until its median is steady or `budget_s` is used up.

        Never fewer than 5 repetitions, after 3 to warm up, nor fewer than 10 within the budget; at most 200.
        """
        for _ in range(WARM_UPS):
            call()
        synchronize(self._device)
        started_s = time.perf_counter()
        times_s: list[float] = []
        while len(times_s) < MOST:
            times_s += self._ranks.slowest(self._block(call))
            late = time.perf_counter() - started_s > budget_s
            steady = len(times_s) >= FEWEST_STEADY and _error_of_median(times_s) < self._spread
            if len(times_s) >= FEWEST and self._ranks.any(late or steady):
                break
        low, middle, high = np.percentile(times_s, [10, 50, 90])
        return Timing(median_s=float(middle), p10_s=float(low), p90_s=float(high), repetitions=len(times_s))

    def _block(self, call: Callable[[], object]) -> list[float]:
        return self._events(call) if self._device.type == "cuda" else [self._clock(call) for _ in range(BLOCK)]

    def _clock(self, call: Callable[[], object]) -> float:
        self._flush.zero_()
        self._ranks.meet()
        started_s = time.perf_counter()
        call()
        return time.perf_counter() - started_s

    def _events(self, call: Callable[[], object]) -> list[float]:
        pairs = []
        for _ in range(BLOCK):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            self._ranks.meet()
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(self._device)
        return [float(start.elapsed_time(end)) / 1e3 for start, end in pairs]  # events answer in milliseconds


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that it was given; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_bytes(device: torch.device) -> int:
    """Memory that can be allocated now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    try:
        return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError):  # a system that does not tell
        return 4 * 2**30


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch failed for lack of memory; its CPU allocator raises a plain RuntimeError."""
    text = str(error).lower()
    return isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text


def _error_of_median(times_s: list[float]) -> float:
    """The median's relative standard error: 1.2533 sigma / sqrt(n), with sigma from the quartiles."""
    low, middle, high = np.percentile(times_s, [25, 50, 75])
    return float(1.2533 * (high - low) / 1.349 / np.sqrt(len(times_s)) / middle)
