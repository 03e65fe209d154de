"""How far each policy is from the best possible: `python -m experiments.beyond` (half an hour on two idle cores).

Llama-3-8B on A100s. Writes a table of each study to `outputs/beyond/`, where finished runs are kept, so that a second
call goes on with what is missing; `python -m experiments.beyond --write` only turns those tables into
`docs/beyond.md` and its figures. Goodput is the highest rate at which 90 % of all requests meet their TTFT SLO.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import flowsim
from experiments import beyond_layered, beyond_stops, suspension
from flowsim import LatencyModel, load_profile
from flowsim.bound import BATCHINGS, goodput_bound
from flowsim.config import build, compose
from flowsim.explain import explain, misses_by_cause

FOLDER = Path("outputs") / "beyond"
JOBS = 2
LOWEST_RPS = 0.2
SEEDS = (0, 1)
HEADLINE_SEEDS = (0, 1, 2, 3, 4)
NUM_REQUESTS = 1000
HEADLINE_REQUESTS = 2000
FOUR_REQUESTS = 2000  # of four instances together

SCENARIOS: dict[str, list[str]] = {
    "Poisson": [],
    "CV 2": ["workload.arrivals={gamma: {cv: 2}}"],
    "CV 3": ["workload.arrivals={gamma: {cv: 3}}"],
    "chat-heavy": ["workload.shares={text: 0.9, image: 0.08, search: 0.015, file: 0.005}"],
    "long-heavy": ["workload.shares={text: 0.4, image: 0.05, search: 0.4, file: 0.15}"],
    "Azure conv": ["workload=azure_conv"],
    "Mooncake": ["workload=mooncake"],
}
POLICIES: dict[str, dict[str, Any]] = {
    "chunked 2k, S-EDF": {"policy": "chunked_sedf"},
    "chunked 100 ms, S-EDF": {"policy": "chunked_adaptive"},
    "slack fraction": {"policy": "slack_fraction"},
    "FlowPrefill": {"policy": "flowprefill"},
    "FlowPrefill, layer stops": {"policy": "layer_sedf"},
    "feasible set": {"policy": "feasible_set"},
}
HEADLINE: dict[str, dict[str, Any]] = {
    "FlowPrefill": {"policy": "flowprefill"},
    "FlowPrefill, layer stops": {"policy": "layer_sedf"},
    "feasible set, operator stops": {"policy": "feasible_set", "policy.stops": "operator"},
    "feasible set": {"policy": "feasible_set"},
}
TWO = {name: POLICIES[name] for name in ("FlowPrefill, layer stops", "feasible set")}
SCALES = (0.5, 2.0)
SIGMAS = (0.1, 0.2, 0.4)
CAUTIOUS: dict[str, dict[str, Any]] = {
    "FlowPrefill, layer stops": {"policy": "layer_sedf"},
    "the same, 80 % quantile": {"policy": "layer_sedf", "predictor.quantile": 0.8},
    "feasible set": {"policy": "feasible_set"},
    "feasible set, 80 % quantile": {"policy": "feasible_set", "predictor.quantile": 0.8},
}
FAIR: dict[str, dict[str, Any]] = {
    "FlowPrefill, layer stops": {"policy": "layer_sedf"},
    "graceful (second deadline at 3 SLOs)": {"policy": "graceful"},
    "feasible set": {"policy": "feasible_set"},
    "feasible set, search x3, file x4": {"policy": "feasible_set", "policy.weights": {"search": 3.0, "file": 4.0}},
}
ROUTERS: dict[str, dict[str, Any]] = {
    "round_robin": {"router": "round_robin"},
    "least_work": {"router": "least_work"},
    "slack_aware": {"router": "slack_aware"},
    "feasible_routing": {"router": "feasible_routing"},
    "migrating within round_robin": {"router": "migrating", "router.within._target_": "flowsim.router.RoundRobin"},
    "migrating within feasible_routing": {"router": "migrating"},
}
REPLAYS = {
    "Azure conv": "trace_azure2023_conv.csv.gz",
    "Azure code": "trace_azure2023_code.csv.gz",
    "Mooncake": "trace_mooncake_conversation.csv.gz",
}
REPLAYED_REQUESTS = 2000  # the first of each trace
DATA = Path(os.environ.get("FLOWSIM_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
MISSES: dict[str, list[str]] = {
    "chunked 2k, S-EDF": ["policy=chunked_sedf"],
    "FlowPrefill": ["policy=flowprefill"],
    "FlowPrefill, layer stops": ["policy=layer_sedf"],
    "feasible set": ["policy=feasible_set"],
}
MISSES_RPS = 10.0

MODEL = LatencyModel(load_profile("llama3-8b", "a100"))
Cells = list[dict[str, Any]]


# ---------------------------------------------------------------- running


def run_all(folder: Path) -> None:
    """Every study that has no table yet, each table written as soon as it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, study in STUDIES.items():
        if (folder / f"{name}.csv").exists():
            continue
        print(name, file=sys.stderr, flush=True)
        table = study(folder)
        if table is not None:
            table.to_csv(folder / f"{name}.csv", index=False)


def searched(
    overrides: Sequence[str],
    cells: Mapping[str, dict[str, Any]],
    folder: Path,
    requests: int = NUM_REQUESTS,
    **more: Any,
) -> pd.DataFrame:
    """Goodput of each named cell, and the attainment of its classes at that rate."""
    seeds = more.pop("seeds", SEEDS)
    found = flowsim.goodput(
        [f"workload.num_requests={requests}", *overrides],
        list(cells.values()),
        seeds=seeds,
        folder=folder / "runs",
        jobs=JOBS,
        precision=0.015,
        low_rps=LOWEST_RPS,
        start_rps=more.pop("start_rps", 10.0),
        **more,
    )
    table, runs = found.table, found.evaluations
    keys = sorted({key for cell in cells.values() for key in cell})
    rows = []
    for place, name in enumerate(cells):
        row = table.iloc[place]
        own = runs[(runs[keys].fillna("").astype(str) == row[keys].fillna("").astype(str)).all(axis=1)]
        at_best = own[np.isclose(own["workload.rate_rps"], row.goodput_rps)]
        classes = [column for column in runs.columns if column.startswith("attainment_by_class.")]
        means = {column.rpartition(".")[2]: at_best[column].mean() for column in classes}
        decision_us = 1e6 * (at_best["scheduler.wall_s"] / at_best["scheduler.decisions"]).mean()
        rows.append(
            {"policy": name, "goodput_rps": row.goodput_rps, "attained": row.attained, "decision_us": decision_us}
            | means
        )
    return pd.DataFrame(rows)


def headline(folder: Path) -> pd.DataFrame:
    """Goodput seed by seed, so that policies can be paired."""
    tables = [
        searched(SCENARIOS[scenario], HEADLINE, folder, HEADLINE_REQUESTS, seeds=(seed,)).assign(
            scenario=scenario, seed=seed
        )
        for scenario in ("Poisson", "CV 2")
        for seed in HEADLINE_SEEDS
    ]
    return pd.concat(tables)


def scenarios(folder: Path) -> pd.DataFrame:
    return pd.concat([searched(o, POLICIES, folder).assign(scenario=name) for name, o in SCENARIOS.items()])


def scales(folder: Path) -> pd.DataFrame:
    """Tighter and looser SLOs."""
    return pd.concat(
        [searched([f"workload.slo_scale={scale}"], TWO, folder).assign(slo_scale=scale) for scale in SCALES]
    )


def errors(folder: Path) -> pd.DataFrame:
    """A predictor that errs."""
    return pd.concat(
        [
            searched(["predictor=noisy", f"predictor.sigma={sigma}"], CAUTIOUS, folder).assign(sigma=sigma)
            for sigma in SIGMAS
        ]
    )


def fairness(folder: Path) -> pd.DataFrame:
    """The highest rate at which every class has its 90 %."""
    overall = searched([], FAIR, folder).set_index("policy")
    each = searched([], FAIR, folder, per_class=True).set_index("policy")
    return overall.assign(per_class_rps=each.goodput_rps).reset_index()


def instances(folder: Path) -> pd.DataFrame:
    """Four instances behind each router."""
    cells = {f"{name}, {router}": policy | chosen for name, policy in TWO.items() for router, chosen in ROUTERS.items()}
    return searched(["cluster.instances=4"], cells, folder, FOUR_REQUESTS, start_rps=44.0)


def replays(folder: Path) -> pd.DataFrame | None:
    """Recorded arrivals with their recorded lengths, all gaps stretched alike to each rate; nothing is drawn."""
    if not DATA.is_dir():
        print(f"replays left out: {DATA} is not a folder; set FLOWSIM_DATA to the one that holds the traces",
              file=sys.stderr)  # fmt: skip
        return None
    tables = []
    for name, file in REPLAYS.items():
        overrides = ["workload=trace", f"workload.path={DATA / file}"]
        found = searched(overrides, POLICIES, folder, REPLAYED_REQUESTS, seeds=(0,))
        bound_rps = _bound(name, overrides, 1, REPLAYED_REQUESTS, "perfect", 0)[-1]
        tables.append(found.assign(scenario=name, bound_rps=bound_rps))
    return pd.concat(tables)


def bounds(_folder: Path) -> pd.DataFrame:
    """The goodput that no schedule can exceed, of each scenario, SLO scale and number of instances."""
    cases = {name: (overrides, 1, NUM_REQUESTS) for name, overrides in SCENARIOS.items()}
    cases |= {f"SLO x {scale:g}": ([f"workload.slo_scale={scale}"], 1, NUM_REQUESTS) for scale in SCALES}
    cases["4 instances"] = ([], 4, FOUR_REQUESTS)
    jobs = [
        (name, overrides, count, requests, batching, seed)
        for name, (overrides, count, requests) in cases.items()
        for batching in (BATCHINGS if name in SCENARIOS else ("perfect",))
        for seed in SEEDS
    ]
    with ProcessPoolExecutor(JOBS) as pool:
        rows = list(pool.map(_bound, *zip(*jobs, strict=True)))
    table = pd.DataFrame(rows, columns=["scenario", "batching", "goodput_rps"])
    return table.groupby(["scenario", "batching"], sort=False).mean().reset_index()


def _bound(
    name: str, overrides: Sequence[str], count: int, requests: int, batching: str, seed: int
) -> tuple[str, str, float]:
    config = compose([*overrides, f"workload.num_requests={requests}", f"seed={seed}"])

    def workload(rate_rps: float) -> Sequence[flowsim.Request]:
        config.workload.rate_rps = rate_rps
        found = build(config).requests
        assert isinstance(found, Sequence)
        return found

    start_rps = 15.0 * count
    return (
        name,
        batching,
        goodput_bound(workload, MODEL, instances=count, batching=batching, start_rps=start_rps, tolerance=0.01),
    )


def misses(_folder: Path) -> pd.DataFrame:
    """Why requests missed, by policy, at one rate."""
    rows = []
    for name, overrides in MISSES.items():
        config = compose([*overrides, f"workload.rate_rps={MISSES_RPS}", f"workload.num_requests={HEADLINE_REQUESTS}"])
        counts = misses_by_cause(explain(build(config).run()))
        rows += [(name, cause, sum(by_class.values())) for cause, by_class in counts.items()]
    return pd.DataFrame(rows, columns=["policy", "cause", "misses"])


STUDIES: dict[str, Callable[[Path], pd.DataFrame | None]] = (
    {
        study.__name__: study
        for study in (headline, scenarios, bounds, replays, misses, instances, fairness, errors, scales)
    }
    | suspension.STUDIES
    | beyond_stops.STUDIES
    | beyond_layered.STUDIES
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the tables are kept")
    parser.add_argument("--write", action="store_true", help="only write docs/beyond.md from the tables there are")
    options = parser.parse_args()
    if not options.write:
        run_all(options.folder)
    from experiments.beyond_report import write

    write(options.folder)


if __name__ == "__main__":
    main()
