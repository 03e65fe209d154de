"""The simulator against what is known exactly: queueing theory, the reference executor, the number of events.

Jobs of queueing theory are prompts on a toy GPU: a millisecond a token, no overheads, 5000 operators a prompt.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flowsim import Alone, ComposedPolicy, LatencyModel, PrefillOnly, Request, SLOAware, load_profile, simulate
from flowsim.check import check_result
from flowsim.core import Batch, Job
from flowsim.policy import View
from flowsim.queue import indexed
from flowsim.testing import toy_latency
from flowsim.workload import mixed

CHECKOUT = Path(__file__).resolve().parents[1]
TOKEN_S = 0.001
LAYERS = 1000
STRETCHES = 20
T_95 = 2.093  # Student's t for 19 degrees of freedom, 95 %
LAST_EVENTS = 3.5  # the most events a request that docs/invariants.md allows

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Theory:
    """A mean that theory gives, and the simulator's with the half-width of its 95 % interval; all in seconds.

    `allowed_s` is what a preemption that waits for the end of an operator may add.
    """

    law: str
    exact_s: float
    simulated_s: float
    half_width_s: float
    allowed_s: float = 0.0

    @property
    def off(self) -> float:
        return self.simulated_s / self.exact_s - 1.0

    @property
    def ok(self) -> bool:
        """Within 3.5 standard errors, which holds for all five means at once with a chance of about 99 %."""
        return abs(self.simulated_s - self.exact_s) <= 3.5 / T_95 * self.half_width_s + self.allowed_s


@indexed()
def by_class(work: Job | Batch, _view: View) -> tuple[str, float]:
    """Class 0 before class 1 before class 2; within one, first come first served."""
    return (work.head if isinstance(work, Batch) else work).request.slo_class, work.arrival_s


def _poisson(rng: np.random.Generator, rates: Sequence[float], sizes: Sequence[Floats]) -> list[Request]:
    """Poisson arrivals of each class, merged; up to the end of the class that ends first."""
    rows = [
        (at, int(ms), str(number))
        for number, (rate, all_ms) in enumerate(zip(rates, sizes, strict=True))
        for at, ms in zip(np.cumsum(rng.exponential(1 / rate, len(all_ms))).tolist(), all_ms, strict=True)
    ]
    last_s = min(max(at for at, _, name in rows if name == str(number)) for number in range(len(rates)))
    kept = sorted(row for row in rows if row[0] <= last_s)
    return [
        Request(id=place, arrival_s=at, prompt_tokens=ms, slo_class=name) for place, (at, ms, name) in enumerate(kept)
    ]


def _measured(law: str, exact_s: float, values_s: Floats, allowed_s: float = 0.0) -> Theory:
    parts = np.array([part.mean() for part in np.array_split(values_s, STRETCHES)])
    half_width_s = T_95 * float(parts.std(ddof=1)) / math.sqrt(STRETCHES)
    return Theory(law, exact_s, float(values_s.mean()), half_width_s, allowed_s)


def single_server(law: str, n: int) -> Theory:
    """Pollaczek and Khinchine: the mean wait is rate E[S^2] / (2 (1 - load)); load 0.6, mean service 1 s."""
    rng = np.random.default_rng(11)
    rate = 0.6
    ms = rng.geometric(1 / 1000, n) if law == "M/M/1" else np.full(n, 1000)
    requests = _poisson(rng, [rate], [ms])
    latency = toy_latency(TOKEN_S, layers=LAYERS)
    result = simulate(requests, policy=ComposedPolicy("arrival", Alone(), "request"), latency=latency)
    check_result(result, latency)
    square_s2 = float(((ms * 1e-3) ** 2).mean())
    load = rate * float((ms * 1e-3).mean())
    return _measured(f"{law} mean wait", rate * square_s2 / (2 * (1 - load)), result.tables["requests"]["queued_s"])


def preemptive_resume(n: int) -> list[Theory]:
    """M/G/1 preemptive-resume priorities, three classes (Kleinrock, vol. 2, 3.6):
    T_k = E[S_k] / (1 - s_(k-1)) + R_k / ((1 - s_(k-1)) (1 - s_k)), s_k being the load of the classes up to k and
    R_k the sum of rate x E[S^2] / 2 over them. The moments are those of the sizes drawn."""
    rng = np.random.default_rng(17)
    rates, loads = (0.3, 0.5, 0.15), (0.2, 0.3, 0.3)
    means_ms = [1000 * load / rate for load, rate in zip(loads, rates, strict=True)]
    counts = [int(n * rate) for rate in rates]
    sizes = [
        np.full(counts[0], round(means_ms[0])),
        rng.geometric(1 / means_ms[1], counts[1]),
        1 + 2 * rng.integers(0, round(means_ms[2]), counts[2]),
    ]
    latency = toy_latency(TOKEN_S, layers=LAYERS)
    result = simulate(
        _poisson(rng, rates, sizes),
        policy=ComposedPolicy(by_class, Alone(), "operator"),
        latency=latency,
        cluster=PrefillOnly(kv_blocks=10**9, max_batches=10**6),
    )
    check_result(result, latency)
    table = result.tables["requests"]
    used = np.cumsum([rate * ms.mean() * 1e-3 for rate, ms in zip(rates, sizes, strict=True)])
    found = []
    for k in range(len(rates)):
        before = float(used[k - 1]) if k else 0.0
        squares = [rate * float((ms * 1e-3) @ (ms * 1e-3)) / len(ms) / 2 for rate, ms in zip(rates, sizes, strict=True)]
        exact_s = sizes[k].mean() * 1e-3 / (1 - before) + sum(squares[: k + 1]) / ((1 - before) * (1 - float(used[k])))
        allowed_s = max(ms.max() for ms in sizes) * 1e-3 / (5 * LAYERS) / (1 - before)
        values_s = table["ttft_s"][table["slo_class"] == str(k)]
        law = f"M/G/1 preemptive-resume sojourn, priority {k + 1}"
        found.append(_measured(law, float(exact_s), values_s, float(allowed_s)))
    return found


def theory(n: int = 60_000) -> list[Theory]:
    """All means that theory gives."""
    return [single_server("M/M/1", n), single_server("M/D/1", n), *preemptive_resume(n)]


def reference_executor() -> tuple[bool, str]:
    """Runs the tests that step through every operator; whether they pass, and what pytest said of it."""
    command = [sys.executable, "-m", "pytest", "tests/test_simulation.py", "-k", "skipping", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    said = re.sub(r" in [\d.]+s.*", "", lines[-1]) if lines else "pytest said nothing"
    return done.returncode == 0, said


def events(num_requests: int = 3000) -> float:
    """Simulator events a request: mixed at 6 req/s, flowprefill, Llama-3-8B on an A100."""
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    requests = mixed(rate_rps=6.0, num_requests=num_requests, seed=1)
    result = simulate(requests, policy=ComposedPolicy("slack_edf", SLOAware(), "operator"), latency=latency)
    check_result(result, latency)
    return float(result.run["events"]) / num_requests
