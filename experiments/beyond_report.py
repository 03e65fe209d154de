"""Writes `docs/beyond.md` and its figures from the tables of `experiments.beyond`; no number in it is typed by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
from scipy import stats

from experiments import beyond, beyond_stops, suspension_report
from experiments.beyond_figures import ALONE, ANY, causes, shares
from experiments.beyond_layered_page import frontier_figure, section
from experiments.beyond_markdown import CLOSING, table_of, words, wrapped
from flowsim.report.style import save

WEIGHTED = "feasible set, search x3, file x4"
DOCS = Path(__file__).resolve().parents[1] / "docs"


def write(folder: Path, docs: Path = DOCS) -> None:
    """`beyond.md` and its figures in the folder of the docs, from the tables in another.

    Raises:
        ValueError: a table is missing.
    """
    there = [name for name in beyond.STUDIES if (folder / f"{name}.csv").exists()]
    missing = [name for name in beyond.STUDIES if name not in (*there, "replays")]  # those need data of others
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}; run python -m experiments.beyond first")
    tables = {name: pd.read_csv(folder / f"{name}.csv") for name in there}
    bound = _bounds(tables["bounds"])
    save(shares(_pivot(tables["scenarios"]), bound), docs / "img" / "beyond_share.png")
    save(causes(tables["misses"]), docs / "img" / "beyond_causes.png")
    save(suspension_report.figure(tables), docs / "img" / suspension_report.FIGURE)
    save(frontier_figure(tables["layered_frontier"]), docs / "img" / "beyond_layered.png")
    sections = [
        _opening(folder),
        _best_possible(tables, bound),
        _headline(tables["headline"]),
        _who_wins(tables["scenarios"], bound),
        _replays(tables.get("replays")),
        _scales(tables["scales"], tables["scenarios"], bound),
        _errors(tables["errors"], tables["scenarios"]),
        _fairness(tables["fairness"]),
        suspension_report.section(tables),
        beyond_stops.section(tables),
        _instances(tables["instances"], bound),
        _causes(tables["misses"]),
        section(tables),
        CLOSING,
    ]
    (docs / "beyond.md").write_text("\n\n".join(map(wrapped, sections)) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- sections


def _opening(folder: Path) -> str:
    runs = [json.loads(line) for line in (folder / "runs" / "points.jsonl").read_text().splitlines()]
    minutes = sum(run["figures"]["simulation_wall_s"] for run in runs) / 60.0
    return f"""
# Beyond the paper

How far is any policy from the best possible, and what beats FlowPrefill? Everything here is Llama-3-8B on
A100s with the
workload `mixed` unless a row says otherwise. **Goodput** is the highest rate, in requests per second, at which at least
90 % of all requests meet their TTFT SLO: {beyond.NUM_REQUESTS} requests a run, seeds
{words(beyond.SEEDS)}, bisected to 1.5 %, run to drain ({beyond.HEADLINE_REQUESTS} requests and
{len(beyond.HEADLINE_SEEDS)} seeds in the first comparison, {beyond.FOUR_REQUESTS} on four instances). Short
runs flatter every
policy, as the backlog is cut off at their end: compare numbers of one table only.

```bash
python -m experiments.beyond           # all tables, and this page; goes on where it was interrupted
python -m experiments.beyond --write   # this page from the tables that are there
```

The {len(runs)} runs behind this page took {minutes:.0f} minutes of one core, on a machine that others used too.
Results that disappoint are kept.
"""


def _best_possible(tables: dict[str, pd.DataFrame], bound: pd.DataFrame) -> str:
    goodput = _pivot(tables["scenarios"])
    rows = [
        [
            scenario,
            f"{bound.loc[scenario, ALONE]:.1f}",
            f"{bound.loc[scenario, ANY]:.1f}",
            *(
                _share(goodput.loc[scenario, name], bound.loc[scenario, ANY])
                for name in ("FlowPrefill", "feasible set")
            ),
        ]
        for scenario in beyond.SCENARIOS
    ]
    heads = ["", ALONE + " [req/s]", ANY + " [req/s]", "FlowPrefill / any", "feasible set / any"]
    return f"""
## The best possible

`task=bound` asks how many requests *any* schedule could serve on time, one that knows all arrivals and pauses for free.
Without batching this is the preemptive single-machine maximum of on-time jobs (Lawler, Annals of Operations Research
26, 1990), taken as a linear program over the intervals that ask for more work than they have time (`flowsim/bound.py`);
small cases are proved by brute force in `tests/test_bound.py`. *Any schedule* also gives every token the rate of the
best batch there is, which no real schedule reaches. A bound on 5000 requests takes about a second;
`task.bound=true` puts it beside any goodput ([studies.md](studies.md)).

{table_of(heads, rows)}
"""


def _headline(table: pd.DataFrame) -> str:
    rows = []
    for scenario, part in table.groupby("scenario", sort=False):
        goodput = part.pivot(index="seed", columns="policy", values="goodput_rps")
        for name in beyond.HEADLINE:
            ratio = goodput[name] / goodput["FlowPrefill"]
            cells = [scenario, name, f"{goodput[name].mean():.2f}"]
            cells += [_interval(ratio), _interval(goodput[name] / goodput["FlowPrefill, layer stops"])]
            rows.append([*cells, f"{part[part.policy == name].decision_us.median():.0f}"])
    heads = ["arrivals", "policy", "goodput", "/ FlowPrefill", "/ FlowPrefill with layer stops", "µs a decision"]
    best = table.pivot(index=["scenario", "seed"], columns="policy", values="goodput_rps")
    ratio = (best["feasible set"] / best["FlowPrefill"]).groupby("scenario").mean()
    spent_us = table.groupby("policy").decision_us.median()
    dearer = spent_us["feasible set"] / spent_us["FlowPrefill, layer stops"]
    return f"""
## A policy that beats FlowPrefill

`policy=feasible_set` keeps the largest set of requests that can still all be on time (Moore and Hodgson, 1968) and
serves it earliest deadline first, in batches that keep every member's deadline; layer stops by default. Its goodput is
{ratio["Poisson"]:.2f} times FlowPrefill's with Poisson arrivals and {ratio["CV 2"]:.2f} times with bursty ones
(CV 2). Goodput seed by seed,
ratios paired by seed with 95 % intervals (Student's t, {len(beyond.HEADLINE_SEEDS)} seeds):

{table_of(heads, rows)}

Why: slack-aware EDF serves a request while it alone could still be on time, and finds out too late that not all of
them can; in an overloaded second it spreads the loss over many. The feasible set gives up the few longest ones at once,
and the time goes to requests that make it. Two smaller parts: what has started ends first where the others can wait,
so that they gather into one batch; and layer stops pay fewer checks. A decision costs O(k log k) for the k
requests that can still be on time alone, here {dearer:.1f} times what FlowPrefill's with layer stops takes (both
measured on a busy machine).
"""


def _who_wins(table: pd.DataFrame, bound: pd.DataFrame) -> str:
    goodput = _pivot(table)
    rows = []
    for name in beyond.POLICIES:
        cells = [
            _rate_and_share(goodput.loc[scenario, name], bound.loc[scenario, ANY]) for scenario in beyond.SCENARIOS
        ]
        rows.append([name, *cells])
    poisson = table[table.scenario == "Poisson"].set_index("policy")
    classes = [name for name in ("text", "image", "search", "file") if name in poisson]
    by_class = [[name, *(f"{poisson.loc[name, one]:.1%}" for one in classes)] for name in beyond.POLICIES]
    return f"""
## Who wins where

Goodput, and its share of the bound of any schedule:

{table_of(["policy", *beyond.SCENARIOS], rows)}

![Goodput as a share of the bound, by policy and workload](img/beyond_share.png)

*CV* is the coefficient of variation of the gaps between arrivals (gamma). *Chat-heavy*: 90 % text, 8 % image, 1.5 %
search, 0.5 % file. *Long-heavy*: 40, 5, 40, 15 %. *Azure conv* and *Mooncake* draw lengths from tables of the
public traces,
with Poisson arrivals and SLOs of 5 times the idle TTFT; they have one class.

{_where(goodput)}

What each class attains at its policy's own goodput, Poisson. With stops inside a pass the late tenth is of the long
classes; chunked policies and slack as a share of the SLO are late for text, at far lower rates. Of the chunks the one
by time (100 ms) is much the better.

{table_of(["policy", *classes], by_class)}
"""


def _where(goodput: pd.DataFrame) -> str:
    """Who is ahead in how many workloads, and where the leader is not the feasible set."""
    ours = goodput["feasible set"]
    rest = goodput.drop(columns="feasible set")
    won = [name for name in goodput.index if ours[name] >= rest.loc[name].max()]
    gain = ours / goodput["FlowPrefill"]
    text = (
        f"The feasible set is ahead in {len(won)} of {len(goodput)} workloads; against FlowPrefill from "
        f"{gain.min():.2f} ({gain.idxmin()}) to {gain.max():.2f} times ({gain.idxmax()})."
    )
    lost = [
        f"{rest.loc[name].idxmax()} leads {name} with {rest.loc[name].max():.2f} against {ours[name]:.2f}"
        for name in goodput.index
        if name not in won
    ]
    return text + (f" Elsewhere {words(lost)}." if lost else "")


def _replays(table: pd.DataFrame | None) -> str:
    if table is None:
        return """
## Recorded arrivals

Left out: the recorded traces were not there (`FLOWSIM_DATA`).
"""
    goodput = table.pivot(index="policy", columns="scenario", values="goodput_rps").loc[list(beyond.POLICIES)]
    best = table.groupby("scenario").bound_rps.first()
    rows = [
        [name, *(_rate_and_share(goodput.loc[name, one], best[one]) for one in beyond.REPLAYS)]
        for name in beyond.POLICIES
    ]
    rows.append([ANY, *(f"{best[one]:.2f}" for one in beyond.REPLAYS)])
    ahead = goodput.loc["feasible set"] / goodput.loc["FlowPrefill"]
    return f"""
## Recorded arrivals

The same question on the traces themselves: the first {beyond.REPLAYED_REQUESTS} requests of each, lengths and gaps as
they were recorded, all gaps stretched alike to a rate (`workload=trace`), SLOs of 5 times the idle TTFT. Nothing is
drawn, so there is one run a rate and no interval. Goodput and share of the bound of any schedule:

{table_of(["policy", *beyond.REPLAYS], rows)}

The feasible set has {words(f"{ahead[one]:.2f}" for one in beyond.REPLAYS)} times FlowPrefill's goodput
({words(beyond.REPLAYS)}). One recorded stretch is one sample: on Mooncake attainment goes up and down by two points
between rates a few percent apart, so that differences of less than a tenth say nothing there.
"""


def _scales(table: pd.DataFrame, scenarios: pd.DataFrame, bound: pd.DataFrame) -> str:
    middle = scenarios[(scenarios.scenario == "Poisson") & scenarios.policy.isin(beyond.TWO)].assign(slo_scale=1.0)
    goodput = pd.concat([table, middle]).pivot(index="slo_scale", columns="policy", values="goodput_rps")
    rows = []
    for scale in sorted(goodput.index):
        best = bound.loc["Poisson" if scale == 1.0 else f"SLO x {scale:g}", ANY]
        cells = [f"{goodput.loc[scale, name]:.2f} ({_share(goodput.loc[scale, name], best)})" for name in beyond.TWO]
        rows.append([f"{scale:g}", *cells, f"{best:.1f}"])
    return f"""
## Tighter and looser SLOs

All TTFT SLOs times a scale; goodput and share of the bound:

{table_of(["SLO scale", *beyond.TWO, ANY], rows)}
"""


def _errors(table: pd.DataFrame, scenarios: pd.DataFrame) -> str:
    exact = scenarios[scenarios.scenario == "Poisson"].set_index("policy").goodput_rps
    rows = []
    for name in beyond.CAUTIOUS:
        own = table[table.policy == name].set_index("sigma").goodput_rps
        base = f"{exact[name]:.2f}" if name in exact else ""
        rows.append([name, base, *(f"{own[sigma]:.2f}" for sigma in beyond.SIGMAS)])
    heads = ["policy", "exact", *(f"sigma {sigma:g}" for sigma in beyond.SIGMAS)]
    return f"""
## Predictions that err

`predictor=noisy`: each length's prediction is off by exp(sigma z). The *80 % quantile* is a cautious scheduler that
plans with the time the truth exceeds once in five (`predictor.quantile=0.8`). Goodput:

{table_of(heads, rows)}

The feasible set plans to the last second and pays for it: it keeps its lead at sigma 0.1, and is behind from 0.2 on,
where prompts believed to be short hold up what others were promised. Planning with a quantile helps both policies, the
feasible set most, and keeps it ahead up to sigma 0.2; at 0.4 a cautious FlowPrefill is better.
"""


def _fairness(table: pd.DataFrame) -> str:
    classes = [name for name in ("text", "image", "search", "file") if name in table]
    rows = [
        [row.policy, f"{row.goodput_rps:.2f}", f"{row.per_class_rps:.2f}", *(f"{row[name]:.1%}" for name in classes)]
        for _, row in table.iterrows()
    ]
    heads = ["policy", "goodput, 90 % of all", "90 % of each class", *classes]
    named = table.set_index("policy")
    floor, overall = named.per_class_rps, named.goodput_rps
    return f"""
## Fairness

A product may need 90 % of *each* class. The first column is the usual goodput, the second the rate up to which every
class keeps its floor, the others each class's attainment at the first.

{table_of(heads, rows)}

Weights (`policy.weights`) raise the floor from {floor["feasible set"]:.2f} to {floor[WEIGHTED]:.2f} req/s, for
{1.0 - overall[WEIGHTED] / overall["feasible set"]:.1%} of the goodput of all: the long classes are what does not fit,
and helping them costs more short ones. Ageing by a second deadline is the dear way: late requests that count again take
the time of those that could still be on time, and in overload it feeds on itself.
"""


def _instances(table: pd.DataFrame, bound: pd.DataFrame) -> str:
    best = bound.loc["4 instances", ANY]
    goodput = table.set_index("policy").goodput_rps
    names = ["FlowPrefill, layer stops", "feasible set"]
    turns, feasible = "round_robin", "feasible_routing"
    moved = {
        within: words(
            f"{goodput[f'{name}, migrating within {within}'] / goodput[f'{name}, {within}'] - 1.0:+.1%}"
            for name in names
        )
        for within in (turns, feasible)
    }
    rows = [
        [
            router,
            *(f"{goodput[f'{name}, {router}']:.1f} ({_share(goodput[f'{name}, {router}'], best)})" for name in names),
        ]
        for router in beyond.ROUTERS
    ]
    return f"""
## Four instances

Goodput of four instances by router, and its share of the bound ({best:.1f} req/s; a request may move between
instances freely there):

{table_of(["`router=`", *names], rows)}

`feasible_routing` sends a request where the most others stay on time with it, and among equals where it ends first in
the order of deadlines. Least work counts work that its instance has given up. `slack_aware` fills the busiest instance
that still meets the deadline in the order of arrival; it is made for policies that do not serve by deadlines.

`router=migrating` moves requests that wait: to an instance with nothing to do, and to one where they are on time when
their own gives them up. It changes the goodput by {moved[turns]} (FlowPrefill, feasible set) within `{turns}` and by
{moved[feasible]} within `{feasible}`; the search's precision is 1.5%. FlowPrefill gains most where requests came by
turns: moving makes up for most of what feasible routing is ahead by. With the feasible set the gain is within the
precision. A rule that also moves whatever would end sooner elsewhere made up to 120 times as many moves with it,
and attained the same within 0.7 points (2000 requests, seeds 0 and 1, 44 and 64 req/s; not in the tables).
"""


def _causes(table: pd.DataFrame) -> str:
    pivot = table.pivot(index="cause", columns="policy", values="misses").fillna(0).astype(int)
    pivot = pivot.loc[pivot.sum(axis=1).sort_values(ascending=False).index]
    names = list(beyond.MISSES)
    rows = [[f"`{cause}`", *(str(pivot.loc[cause, name]) for name in names)] for cause in pivot.index]
    rows.append(["all", *(str(pivot[name].sum()) for name in names)])
    return f"""
## Why requests miss

`task=explain` follows each missed request's slack until it is gone: what took most of it is the cause, and causes add
up to all misses. `mixed` at {beyond.MISSES_RPS:g} req/s, {beyond.HEADLINE_REQUESTS} requests, seed 0:

{table_of(["cause", *names], rows)}

![Misses by cause and policy](img/beyond_causes.png)

Chunked prefill misses in four ways: behind requests due later (head-of-line blocking within a pass), in passes shared
with others, behind work that was late all the same, and in plain overload. Stops inside a pass leave the last alone;
the feasible set lowers it by giving up fewer, longer requests. `behind_earlier`: most of the slack went to requests due
before it that were on time; `behind_lost`: to ones due before it that were late; `behind_later`: to ones due after it;
`batched`: to its own batch, which took longer than it alone; `hopeless`: its SLO is below its idle TTFT.
"""


# ---------------------------------------------------------------- tables


def _bounds(table: pd.DataFrame) -> pd.DataFrame:
    named = table.replace({"batching": {"alone": ALONE, "perfect": ANY}})
    return named.pivot(index="scenario", columns="batching", values="goodput_rps")


def _pivot(scenarios: pd.DataFrame) -> pd.DataFrame:
    return scenarios.pivot(index="scenario", columns="policy", values="goodput_rps").loc[list(beyond.SCENARIOS)]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}"


def _rate_and_share(goodput_rps: float, bound_rps: float) -> str:
    """A goodput and its share of the bound; where even the lowest rate looked at failed, that rate."""
    if math.isnan(goodput_rps):
        return f"below {beyond.LOWEST_RPS:g}"
    return f"{goodput_rps:.2f} ({_share(goodput_rps, bound_rps)})"


def _interval(ratios: pd.Series) -> str:
    """The mean and its 95 % interval."""
    if (ratios == 1.0).all():
        return "1"
    half = stats.t.ppf(0.975, len(ratios) - 1) * ratios.std(ddof=1) / math.sqrt(len(ratios))
    return f"{ratios.mean():.3f} ± {half:.3f}"
