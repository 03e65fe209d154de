"""What stops that each batch has of its own are worth: `python -m experiments.beyond_stops` (minutes on two cores).

FlowPrefill and the feasible set with stops of one kind, and with `adaptive_stops` around them, at the profile's cost of
a check and at ten times that. Prints its section of `docs/beyond.md`; `experiments.beyond` has it too. The rule was
chosen on other seeds (10 to 19) than those that are shown.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

import flowsim
from experiments.beyond_markdown import table_of, words, wrapped
from flowsim import Stops, load_profile
from flowsim.config import build, compose
from flowsim.feasible import FeasibleSet
from flowsim.granularity import AdaptiveStops

__all__ = ["STUDIES", "section"]

FOLDER = Path("outputs") / "beyond_stops"
JOBS = 2
SEEDS = (0, 1, 2, 3, 4)
NUM_REQUESTS = 2000
PRECISION = 0.005
CHECK_S = load_profile("llama3-8b", "a100").check_s
CHECKS = {"20 µs": CHECK_S, "200 µs": 10.0 * CHECK_S}
SCENARIOS: dict[str, list[str]] = {"Poisson": [], "CV 2": ["workload.arrivals={gamma: {cv: 2}}"]}
CHOSEN_RPS = 12.0

LAYERS = "FlowPrefill, layer stops"
FROM_LAYERS = "FlowPrefill, adaptive from layers on"
TO_LAYERS = "FlowPrefill, none or layers"
ADAPTIVE = "FlowPrefill, adaptive stops"
FEASIBLE = "feasible set, layer stops"
FEASIBLE_ADAPTIVE = "feasible set, adaptive stops"
POLICIES: dict[str, dict[str, Any]] = {
    "FlowPrefill, operator stops": {"policy": "flowprefill"},
    "FlowPrefill, block stops": {"policy": "block_sedf"},
    LAYERS: {"policy": "layer_sedf"},
    FROM_LAYERS: {"policy": "adaptive_stops", "policy.within.stops": "layer"},
    TO_LAYERS: {"policy": "adaptive_stops", "policy.densest": "layer"},
    ADAPTIVE: {"policy": "adaptive_stops"},
    FEASIBLE: {"policy": "feasible_set"},
    FEASIBLE_ADAPTIVE: {"policy": AdaptiveStops(FeasibleSet(stops="pass"))},
}
FREE = {
    "FlowPrefill, operator stops": {"policy": "flowprefill"},
    "feasible set, operator stops": {"policy": "feasible_set", "policy.stops": "operator"},
}
"""With checks that cost nothing: no granularity can do better."""


def adaptive(folder: Path) -> pd.DataFrame:
    """Goodput seed by seed, so that policies can be paired."""
    named = [(name, check, cell | {"overheads.check_s": check_s})
             for check, check_s in CHECKS.items() for name, cell in POLICIES.items()]  # fmt: skip
    named += [(name, "free", cell | {"overheads.check_s": 0.0}) for name, cell in FREE.items()]
    rows = []
    for scenario, overrides in SCENARIOS.items():
        for seed in SEEDS:
            found = flowsim.goodput(
                [f"workload.num_requests={NUM_REQUESTS}", *overrides],
                [cell for *_, cell in named],
                seeds=(seed,),
                folder=folder / "runs",
                jobs=JOBS,
                precision=PRECISION,
                start_rps=12.0,
            )
            goodput_rps = found.table["goodput_rps"].tolist()
            rows += [
                {"scenario": scenario, "seed": seed, "policy": name, "check": check, "goodput_rps": rps}
                for (name, check, _), rps in zip(named, goodput_rps, strict=True)
            ]
    return pd.DataFrame(rows)


def adaptive_chosen(_folder: Path) -> pd.DataFrame:
    """Which stops FlowPrefill's batches get, by the longest prompt that they have."""
    rows = []
    for check, check_s in CHECKS.items():
        overrides = [f"workload.rate_rps={CHOSEN_RPS}", f"workload.num_requests={NUM_REQUESTS}"]
        result = build(compose(["policy=adaptive_stops", f"overheads.check_s={check_s}", *overrides])).run()
        tokens = result.batches.groupby("batch").tokens.max()
        chosen = pd.DataFrame(result.tables["stops"]).set_index("batch").stops
        size = pd.cut(tokens, [0, *SIZES.values()], labels=list(SIZES))
        counts = chosen.groupby([size[chosen.index], chosen], observed=False).size()
        rows += [
            {"check": check, "prompt": prompt, "stops": stops, "batches": count}
            for (prompt, stops), count in counts.items()
        ]
    return pd.DataFrame(rows)


SIZES = {"up to 1000 tokens": 1000, "to 3000": 3000, "longer": math.inf}


STUDIES: dict[str, Callable[[Path], pd.DataFrame | None]] = {
    study.__name__: study for study in (adaptive, adaptive_chosen)
}


# ---------------------------------------------------------------- the page


def section(tables: Mapping[str, pd.DataFrame]) -> str:
    """The section, every number of it from the tables."""
    table = tables["adaptive"]
    goodput = table.pivot(index=["scenario", "seed"], columns=["check", "policy"], values="goodput_rps")
    rows = []
    for scenario in SCENARIOS:
        own = goodput.loc[scenario]
        for name in POLICIES:
            cells = [scenario, name]
            for check in CHECKS:
                base = LAYERS if name.startswith("FlowPrefill") else FEASIBLE
                cells += [f"{own[check, name].mean():.2f}", _interval(own[check, name] / own[check, base])]
            rows.append(cells)
        for name in FREE:
            base = own[next(iter(CHECKS)), LAYERS if name.startswith("FlowPrefill") else FEASIBLE]
            rows.append([scenario, f"{name}, free checks", f"{own['free', name].mean():.2f}",
                         _interval(own["free", name] / base), "", ""])  # fmt: skip
    heads = ["arrivals", "policy"]
    for check in CHECKS:
        heads += [f"goodput, checks of {check}", "/ its layer stops"]
    return f"""
## How dense should stops be

`policy=adaptive_stops` chooses the stops of each batch when it starts: none inside a pass, every layer, half a layer
or operator, whichever is expected to delay requests least, by checks that everybody here waits for or by waits of
those who come meanwhile and go first ([policies.md](policies.md)). *From layers on* leaves it layers at least, *none
or layers* the two sparsest.
Goodput of {NUM_REQUESTS} requests to {PRECISION:.1%}, seeds {words(SEEDS)}, at the profile's cost of a check and at
ten times that; ratios paired by seed with 95 % intervals (Student's t). The rule was chosen on other seeds. Operator
stops with free checks are about the best that any granularity could do.

{table_of(heads, rows)}

{_verdict(goodput)}

{_chosen(tables["adaptive_chosen"])}

Tried while the rule was made, and left: weighing each second by 1 / SLO (0.3 points of attainment less at 11 req/s
with checks of 200 µs), counting those who will come until the backlog is gone (1 point less), counting late requests
as held up too (4 points less). Seeds 10 to 19, 10 to 15 for the last; not in the tables.

`python -m experiments.beyond_stops` makes this section alone.
"""


def _verdict(goodput: pd.DataFrame) -> str:
    """How far adaptive stops are ahead of layers, what of it is due to having none, and what is left to win."""

    def gains(check: str, name: str, base: str) -> str:
        ratios = goodput[check, name] / goodput[next(iter(CHECKS)) if check == "free" else check, base]
        intervals = [_mean_and_half(ratios.loc[scenario]) for scenario in SCENARIOS]
        return words(f"{100.0 * (mean - 1.0):+.1f} ± {100.0 * half:.1f} %" for mean, half in intervals)

    first, dear = CHECKS
    return (
        f"Against layer stops, adaptive ones change FlowPrefill's goodput by {gains(first, ADAPTIVE, LAYERS)} "
        f"({words(SCENARIOS)}) and the feasible set's by {gains(first, FEASIBLE_ADAPTIVE, FEASIBLE)}; with checks of "
        f"{dear} by {gains(dear, ADAPTIVE, LAYERS)} and {gains(dear, FEASIBLE_ADAPTIVE, FEASIBLE)}. From layers on it "
        f"is {gains(first, FROM_LAYERS, LAYERS)}, and {gains(dear, FROM_LAYERS, LAYERS)} where checks are dear; none "
        f"or layers give {gains(first, TO_LAYERS, LAYERS)}, and {gains(dear, TO_LAYERS, LAYERS)}: what is won is won "
        "by batches of short prompts, which nothing will be due before and which have no check at all. Dense stops for "
        "long prompts save waits of milliseconds, which hardly make anybody late. Free checks would change "
        f"FlowPrefill's by {gains('free', next(iter(FREE)), LAYERS)}."
    )


def _chosen(table: pd.DataFrame) -> str:
    names = [stops.value for stops in Stops if stops is not Stops.REQUEST]
    rows = []
    for (check, prompt), part in table.groupby(["check", "prompt"], sort=False):
        counts = part.set_index("stops").batches.reindex(names, fill_value=0)
        rows.append([check, prompt, str(counts.sum()), *(f"{count / counts.sum():.0%}" for count in counts)])
    return (
        f"What FlowPrefill's batches get, by the longest prompt in them (Poisson, {CHOSEN_RPS:g} req/s, seed 0):\n\n"
        + table_of(["check", "longest prompt", "batches", *names], rows)
    )


def _mean_and_half(ratios: pd.Series) -> tuple[float, float]:
    """The mean, and half of its 95 % interval."""
    half = stats.t.ppf(0.975, len(ratios) - 1) * ratios.std(ddof=1) / math.sqrt(len(ratios))
    return float(ratios.mean()), float(half)


def _interval(ratios: pd.Series) -> str:
    if (ratios == 1.0).all():
        return "1"
    return "{:.3f} ± {:.3f}".format(*_mean_and_half(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the tables are kept")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    tables = {}
    for name, study in STUDIES.items():
        path = folder / f"{name}.csv"
        if not path.exists():
            study(folder).to_csv(path, index=False)  # type: ignore[union-attr]
        tables[name] = pd.read_csv(path)
    print("\n\n".join(wrapped(part) for part in [section(tables)]))


if __name__ == "__main__":
    main()
