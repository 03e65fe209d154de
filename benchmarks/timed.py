"""A command as a process of its own: its wall time, processor time and peak memory."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

__all__ = ["Timed", "run"]


class Timed(NamedTuple):
    """What a process took, its children included; `output` is what it printed."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    output: str


def run(command: Sequence[str], *, cwd: str | None = None) -> Timed:
    """Runs a command to its end.

    Raises:
        RuntimeError: it failed; the end of its errors is given.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        began_s = perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=errors, cwd=cwd)
        _, status, used = os.wait4(process.pid, 0)
        wall_s = perf_counter() - began_s
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} failed with {process.returncode}: {errors.read()[-2000:]}")
        return Timed(wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, output.read())
