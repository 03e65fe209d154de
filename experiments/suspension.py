"""When unbounded suspension raises the mean TTFT, and what a bound on it costs: `python -m experiments.suspension`.

Four studies, some minutes on two cores: prefills held back while others decode, as in the report that the question
comes from; newest first, where theory says how much a bound can repair; FlowPrefill's order under conditions in which
suspended work might pile up, and under conditions drawn at random. Prints their section of `docs/beyond.md`;
`experiments.beyond` has them too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import flowsim
from flowsim import Alone, Batch, ComposedPolicy, LatencyModel, Part, Request, Stops, View, load_profile
from flowsim.hybrid import InteractiveLIFO
from flowsim.metrics import Result
from flowsim.policy import arrival
from flowsim.variants import make_setup, variant
from flowsim.workload.closed_loop import ClosedLoop

CLASSES = ("text", "image", "search", "file")
FOLDER = Path("outputs") / "suspension"
JOBS = 2
SEEDS = (0, 1, 2, 3, 4)
LIMITS_S = (math.inf, 5.0, 1.0, 0.25, 0.05)

USERS = 4
HELD_REQUESTS = 400
HELD_PROMPTS = (2048, 8192)  # tokens, uniform
HELD_OUTPUTS = (64, 192)
THRESHOLDS = (3, 2)  # sequences that decode

LOADS = (0.7, 0.8, 0.9, 0.95)
EQUAL_TOKENS = 2000
NUM_REQUESTS = 2000

EQUAL: dict[str, Any] = {
    "workload": "uniform",
    "workload.min_tokens": EQUAL_TOKENS,
    "workload.max_tokens": EQUAL_TOKENS,
    "workload.rate_rps": 6.6,
}
CONDITIONS: dict[str, dict[str, Any]] = {
    "`mixed`, 6 req/s": {"workload.rate_rps": 6.0},
    "`mixed`, 10 req/s": {"workload.rate_rps": 10.0},
    "14 req/s": {"workload.rate_rps": 14.0},
    "10 req/s, at most 8 batches under way": {"workload.rate_rps": 10.0, "cluster.max_batches": 8},
    "10 req/s, KV for 40,000 tokens": {"workload.rate_rps": 10.0, "cluster.kv_blocks": 2500},
    "10 req/s, earliest deadline first": {"policy": "edf", "workload.rate_rps": 10.0},
    "10 req/s, shortest first": {"policy": "shortest", "workload.rate_rps": 10.0},
    "long-heavy, RTX 4090, 3 req/s": {
        "gpu": "rtx4090",
        "workload.rate_rps": 3.0,
        "workload.shares": {"text": 0.4, "image": 0.05, "search": 0.4, "file": 0.15},
    },
    "`mooncake`, 1.2 req/s": {"workload": "mooncake", "workload.rate_rps": 1.2},
    "`mixed`, long prompts urgent, 8 req/s": {
        "workload.rate_rps": 8.0,
        "workload.slo": "none",
        "workload.ttft_slo_s": {"text": 30.0, "image": 30.0, "search": 1.5, "file": 3.0},
    },
    "equal prompts, SLO 5 idle TTFTs": EQUAL,
    "equal prompts, SLO 0.15 s, just above": EQUAL | {"workload.ttft_slo_s": 0.15},
    "equal prompts, SLO 0.1 s, below": EQUAL | {"workload.ttft_slo_s": 0.1},
}
DRAWN = 40
DRAWN_REQUESTS = 1000
DRAWN_LIMITS_S = (math.inf, 1.0, 0.05)


# ---------------------------------------------------------------- what is run


class HeldWhileDecoding:
    """Chunks beside decodes, first come first served; but while `threshold` or more sequences decode, a prefill that
    has begun is held back before each of its next chunks, until they are fewer or it has been held for `limit_s`.

    The rule of vllm-project/vllm#44794. A view does not say since when a prompt lies between two chunks, so this
    remembers when it first saw it there.
    """

    stops = Stops.PASS
    consult = "stops"  # a hold may end in the middle of a run of decodes

    def __init__(self, threshold: int, limit_s: float, tokens: int = 2048) -> None:
        self.threshold = threshold
        self.limit_s = limit_s
        self.tokens = tokens
        self._held_since_s: dict[tuple[int, int], float] = {}

    def select(self, view: View) -> Batch | None:
        if view.running is not None and view.running.parts:
            return view.running
        decodes = view.decoding
        room = self.tokens - len(decodes)
        parts: list[Part] = []
        for job in view.waiting.by(arrival):
            if room <= 0:
                break
            if job.done_tokens and len(decodes) >= self.threshold:
                since_s = self._held_since_s.setdefault((job.id, job.done_tokens), view.now_s)
                if view.now_s < since_s + self.limit_s - 1e-9:
                    continue
            part = Part(job, min(job.left_tokens, room))
            if not job.done_tokens and not view.fits([*parts, part]):
                break
            parts.append(part)
            room -= part.tokens
        if view.running is not None and not parts:
            return view.running
        return Batch(parts, decodes) if parts or decodes else None


def four_users(*, num_requests: int = HELD_REQUESTS, seed: int = 0) -> ClosedLoop:
    """Users who ask again as soon as they have their answer: what `--max-concurrency 4` does."""
    draw = np.random.default_rng(seed)
    prompts = draw.integers(HELD_PROMPTS[0], HELD_PROMPTS[1], num_requests, endpoint=True).tolist()
    outputs = draw.integers(HELD_OUTPUTS[0], HELD_OUTPUTS[1], num_requests, endpoint=True).tolist()
    asked = [
        Request(id=place, arrival_s=0.0, prompt_tokens=prompt, output_tokens=output)
        for place, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    return ClosedLoop(asked, [0.0] * num_requests, USERS)


def service_s() -> float:
    """GPU seconds of one of the equal prompts."""
    model = LatencyModel(load_profile("llama3-8b", "a100")).bound(pass_tokens=8192, stops=Stops.OPERATOR)
    return model.whole(EQUAL_TOKENS).total_s


def suspended_share(result: Result) -> Mapping[str, float]:
    """How much of all time to first tokens was suspension."""
    done = result.requests[result.requests.ttft_s.notna()]
    return {"suspended_share": float(done.suspended_s.sum() / done.ttft_s.sum())}


# ---------------------------------------------------------------- studies


def held(folder: Path) -> pd.DataFrame:
    """Prefills held back while others decode."""
    policies = {"none": "vllm"} | {
        f"{threshold} {limit_s:g}": HeldWhileDecoding(threshold, limit_s)
        for threshold in THRESHOLDS
        for limit_s in LIMITS_S
    }
    return flowsim.sweep(
        ["cluster=colocated", "cluster.async_steps=0", f"workload.num_requests={HELD_REQUESTS}"],
        {"policy": policies, "workload": {"four users": four_users}},
        seeds=SEEDS,
        folder=folder / "runs",
        jobs=JOBS,
    )[["policy", "seed", "ttft_s.mean", "ttft_s.p50", "ttft_s.p99", "tbt_mean_s.mean", "tbt_max_s.mean"]]


def newest(folder: Path) -> pd.DataFrame:
    """The newest request first, equal prompts, one at a time."""
    bounded = {
        f"{limit_s:g}": ComposedPolicy(InteractiveLIFO(math.inf), Alone(), "operator", max_suspend_s=limit_s)
        for limit_s in LIMITS_S
    }
    busy_s = service_s()
    loads = {f"{load:g}": {"workload.rate_rps": load / busy_s} for load in LOADS}
    lengths = [f"workload.{end}_tokens={EQUAL_TOKENS}" for end in ("min", "max")]
    return flowsim.sweep(
        ["workload=uniform", *lengths, f"workload.num_requests={NUM_REQUESTS}"],
        {"load": loads, "policy": bounded},
        seeds=SEEDS,
        measure=suspended_share,
        folder=folder / "runs",
        jobs=JOBS,
    )[["load", "policy", "seed", "ttft_s.mean", "ttft_s.p99", "attainment", "suspended_share"]]


def orders(folder: Path) -> pd.DataFrame:
    """FlowPrefill, and its order's rivals, where suspended work might pile up."""
    found = flowsim.sweep(
        [f"workload.num_requests={NUM_REQUESTS}", "policy=flowprefill"],
        {"condition": CONDITIONS, "policy.max_suspend_s": LIMITS_S},
        seeds=SEEDS,
        measure=suspended_share,
        folder=folder / "runs",
        jobs=JOBS,
    )
    classes = [name for name in found if name.startswith("attainment_by_class.")]
    figures = ["ttft_s.mean", "ttft_s.p99", "suspended_s.max", "suspended_share", "attainment", *classes]
    return found[["condition", "policy.max_suspend_s", "seed", *figures]]


def drawn(folder: Path) -> pd.DataFrame:
    """FlowPrefill under conditions drawn at random, one seed each: is there one that nobody thought of?"""
    return flowsim.sweep(
        [f"workload.num_requests={DRAWN_REQUESTS}", "workload.slo=none", "workload.max_context_tokens=20000"],
        {"condition": random_conditions(), "policy.max_suspend_s": DRAWN_LIMITS_S},
        measure=suspended_share,
        folder=folder / "runs",
        jobs=JOBS,
    )[["condition", "policy.max_suspend_s", "seed", "ttft_s.mean", "attainment", "suspended_share"]]


def random_conditions() -> dict[str, dict[str, Any]]:
    """Class shares, an SLO of 0.3 to 60 s for each class whatever its length, KV memory for 24,000 tokens to all there
    is, 2 to 128 batches under way, gaps with a CV of 1 or 3, and a load of 0.8 to 1.1."""
    draw = np.random.default_rng(7)
    found = {}
    for number in range(DRAWN):
        parts = draw.dirichlet((1.0, 1.0, 1.0, 0.5)).round(3)
        parts[0] += 1.0 - parts.sum()
        slos_s = 0.3 * 200.0 ** draw.random(4)
        changes = {
            "workload.shares": dict(zip(CLASSES, parts.tolist(), strict=True)),
            "workload.ttft_slo_s": dict(zip(CLASSES, slos_s.tolist(), strict=True)),
            "workload.arrivals": {"gamma": {"cv": int(draw.choice((1, 3)))}},
            "cluster.kv_blocks": (None, 5000, 2500, 1500)[draw.integers(4)],
            "cluster.max_batches": (128, 128, 8, 2)[draw.integers(4)],
        }
        load = float(draw.choice((0.8, 0.9, 1.0, 1.1)))
        slow, _ = variant((), changes | {"workload.rate_rps": 1.0, "workload.max_context_tokens": 20000}, objects={})
        offered = make_setup(slow, {}).offered_load()
        assert offered is not None
        found[f"{number}"] = changes | {"workload.rate_rps": load / offered}
    return found


STUDIES: dict[str, Callable[[Path], pd.DataFrame]] = {
    f"suspension_{study.__name__}": study for study in (held, newest, orders, drawn)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where finished runs and the tables are kept")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    tables = {}
    for name, study in STUDIES.items():
        tables[name] = study(folder)
        tables[name].to_csv(folder / f"{name}.csv", index=False)
    from experiments.beyond_markdown import wrapped
    from experiments.suspension_report import FIGURE, figure, section
    from flowsim.report.style import save

    save(figure(tables), folder / FIGURE)
    print(wrapped(section(tables)))


if __name__ == "__main__":
    main()
