"""The section of `docs/beyond.md` on bounded suspension, from the tables of `experiments.suspension`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from experiments import suspension
from experiments.beyond_markdown import table_of
from flowsim.report.style import PAGE_IN, drawn, figure_of, legend_above, looks
from flowsim.study.attained import half_width

__all__ = ["FIGURE", "figure", "section"]

FIGURE = "beyond_suspension.png"

CLASSES = suspension.CLASSES
SHOWN = ("`mixed`, 6 req/s", "`mixed`, 10 req/s", "10 req/s, at most 8 batches under way")
TIGHT = "equal prompts, SLO 0.15 s, just above"
DRAWN = ("`mixed`, 6 req/s", "`mixed`, 10 req/s", "`mooncake`, 1.2 req/s", TIGHT)


@drawn
def figure(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """The mean TTFT by bound, as a share of that without one, where suspension is most of it and where it is not."""
    held, newest, orders, _ = (tables[name] for name in suspension.STUDIES)
    of_three = held[held.policy.str.startswith("3 ")]
    lines = {
        "held back while three decode": of_three.assign(at=of_three.policy.str[2:].astype(float)),
        "newest first, load 0.95": newest[newest.load.astype(float) == 0.95].assign(at=newest.policy.astype(float)),
        **{
            f"FlowPrefill: {name.replace('`', '').removesuffix(', just above')}": of.assign(
                at=of["policy.max_suspend_s"]
            )
            for name, of in orders.groupby("condition", sort=False)
            if name in DRAWN
        },
    }
    limits_s = sorted(suspension.LIMITS_S)
    found = figure_of(PAGE_IN, 0.36)
    axes = found.subplots()
    for name, look in looks(lines).items():
        means = lines[name].pivot(index="seed", columns="at", values="ttft_s.mean")
        shares = [100.0 * (means[limit_s] / means[math.inf]).mean() for limit_s in limits_s]
        axes.plot(range(len(limits_s)), shares, look.marker, linestyle=look.line, color=look.colour, label=name)
    axes.set_xticks(range(len(limits_s)), [f"{_limit(limit_s)}" for limit_s in limits_s])
    axes.set(xlabel="longest suspension allowed", ylabel="mean TTFT, % of that\nwithout a bound", yscale="log")
    axes.set_yticks([40, 60, 100, 200, 400], ["40", "60", "100", "200", "400"])
    axes.set_yticks([], minor=True)
    legend_above(found)
    return found


def section(tables: Mapping[str, pd.DataFrame]) -> str:
    """Its Markdown, not wrapped."""
    held, newest, orders, drawn = (tables[name] for name in suspension.STUDIES)
    return f"""
## Bounded suspension

A pull request to vLLM (vllm-project/vllm#44794, comment of July 2026) reports that suspending prefills without
a bound
doubled the mean TTFT, 450 to 969 ms, and that a bound of 50 ms brought it to 412 ms (Qwen3-1.7B, four clients, random
prompts; we did not find their lengths, the GPU, or how often it was run). Where does that happen, and what
does a bound
cost? `python -m experiments.suspension` makes these tables alone.

A TTFT is time queued, running and suspended. A bound takes from the last, and what is let go on makes others wait
instead; what it
can repair is little wherever little of all TTFT is suspension (the column *suspended*).

![Mean TTFT by bound](img/{FIGURE})

**Held back while others decode.** The pull request's rule suspends a prefill while many sequences decode, for
nobody more
urgent, and the GPU is then far from busy. {suspension.USERS} users who ask again at once, prompts of
{suspension.HELD_PROMPTS[0]} to {suspension.HELD_PROMPTS[1]} tokens, {suspension.HELD_OUTPUTS[0]} to
{suspension.HELD_OUTPUTS[1]} tokens out, vLLM's steps of 2048 tokens on Llama-3-8B and one A100. A prefill that
has begun
is held back before each further chunk while at least so many of the four decode
({suspension.HELD_REQUESTS} requests, {len(suspension.SEEDS)} seeds, ratios paired by seed with 95 % intervals):

{_held(held)}

The effect is there, and stronger than reported: without a bound the mean TTFT is {_ratio(held, 3):.1f} times
that of no
suspension where three hold a prefill back, and {_ratio(held, 2):.1f} times where two do. A bound of 50 ms
repairs most
of it ({_ratio(held, 3, 0.05):.2f} and {_ratio(held, 2, 0.05):.2f} times), not all, as a prompt is held again
before each
chunk; 1 s or more does little, for few holds last so long. What it is all for, the mean time between tokens, is
{_less(held, 3):.0%} shorter without a bound (three) and {_less(held, 3, 0.05):.0%} with 50 ms; the longest gap
is that of
a first chunk and stays.

**Newest first.** Where whatever comes runs at once and suspends what ran, nearly all TTFT is suspension. Equal
prompts
of {suspension.EQUAL_TOKENS} tokens, one at a time, operator stops, the newest first
(`flowsim.hybrid.InteractiveLIFO`); as the bound goes to 0 this becomes first come first served. For Poisson
arrivals and
equal times of service queueing theory has the ratio of the two means, 2 / (2 - load) (M/D/1, preemptive LIFO
over FCFS):

{_newest(newest)}

So the mean doubles as the load goes to 1, and 50 ms repair it; here they cost nothing, as more are on time too
(SLOs of
5 idle TTFTs). A bound about as long as an SLO (1 s, 0.7 s) only makes more of them late.

**FlowPrefill's order**, under conditions in which suspended work might pile up:

{_orders(orders)}

{_extremes(orders)} S-EDF suspends for what is due earlier, which on `mixed` is shorter; shortest first has the
least mean
there is, so most bounds raise it or leave it alone. It is different where SLOs cannot be met: what is hopeless S-EDF
serves latest deadline first, and of equal SLOs that is newest first. With SLOs below the idle TTFT it is the
case above.
With SLOs just above it what comes is on time only if it runs at once: there a bound of 50 ms trades
{_points(orders, TIGHT, 0.05):.0f} points of attainment for a mean {_repair(orders, TIGHT, 0.05):.2f} times smaller.

Nor does suspended work fill the KV memory so that nothing new fits: what is first in order and does not fit lets the
suspended go on, and with KV for 40,000 tokens less of the TTFT is suspension, not more. Places are another
matter: where
few batches may be under way (`cluster.max_batches`) the suspended hold those that urgent requests would start
in, and a
bound of 1 s gives {-_points(orders, SHOWN[-1], 1.0):.1f} points of attainment. Earliest deadline first pauses almost
nothing in overload, where the oldest is always due first.

{_drawn(drawn)}

The trade by class ({suspension.NUM_REQUESTS} requests, means of {len(suspension.SEEDS)} seeds):

{_trade(orders)}

At 6 req/s there is nothing to gain: a bound of 5 s changes nothing, and one of 50 ms costs text
{_points(orders, SHOWN[0], 0.05, "text"):.0f} points. At 10 req/s bounds of seconds cost all classes; 50 ms
give search
{-_points(orders, SHOWN[1], 0.05, "search"):.1f} points and file {-_points(orders, SHOWN[1], 0.05, "file"):.1f}, for
{_points(orders, SHOWN[1], 0.05, "text"):.0f} of text. What a bound does end is starvation: one 16,000-token request
under 90 % of urgent load has a TTFT of 13.5 s without and 1.6 s with a bound of 0.2 s ([policies.md](policies.md),
"Starvation").
"""


# ---------------------------------------------------------------- tables


def _held(table: pd.DataFrame) -> str:
    heads = [
        "held back at",
        "bound",
        "TTFT mean [s]",
        "/ none",
        "p50 [s]",
        "p99 [s]",
        "TBT mean [ms]",
        "worst TBT [ms]",
    ]
    rows = []
    for name, of in table.groupby("policy", sort=False):
        threshold, _, limit = name.partition(" ")
        means = of.mean(numeric_only=True)
        against = "1" if name == "none" else _times(_paired(table, name, "none"))
        rows.append(
            [
                "never" if name == "none" else f"{threshold} decoding",
                "" if name == "none" else _limit(float(limit)),
                f"{means['ttft_s.mean']:.3f}",
                against,
                f"{means['ttft_s.p50']:.3f}",
                f"{means['ttft_s.p99']:.2f}",
                f"{1e3 * means['tbt_mean_s.mean']:.1f}",
                f"{1e3 * means['tbt_max_s.mean']:.0f}",
            ]
        )
    return table_of(heads, rows)


def _newest(table: pd.DataFrame) -> str:
    table = table.assign(policy=table.policy.astype(float))  # the bound
    shown = (math.inf, 1.0, 0.05)
    against = [f"none / {_limit(limit_s)}" for limit_s in suspension.LIMITS_S[1:]]
    attained = [f"attained, {_limit(limit_s)}" for limit_s in shown]
    heads = ["load", "suspended", "TTFT mean [s]", *against, "theory", *attained]
    rows = []
    for load, of in table.groupby("load", sort=False):
        means = of.groupby("policy").mean(numeric_only=True)
        rows.append(
            [
                f"{float(load):g}",
                f"{means.loc[math.inf, 'suspended_share']:.0%}",
                f"{means.loc[math.inf, 'ttft_s.mean']:.3f}",
                *(_times(_paired(of, math.inf, limit_s)) for limit_s in suspension.LIMITS_S[1:]),
                f"{2.0 / (2.0 - float(load)):.2f}",
                *(f"{means.loc[limit_s, 'attainment']:.1%}" for limit_s in shown),
            ]
        )
    return table_of(heads, rows)


def _orders(table: pd.DataFrame) -> str:
    shown = (math.inf, 1.0, 0.05)
    heads = ["", "suspended", "TTFT mean [s]", *(f"none / {_limit(limit_s)}" for limit_s in suspension.LIMITS_S[1:]),
             *(f"attained, {_limit(limit_s)}" for limit_s in shown)]  # fmt: skip
    rows = []
    for name, of in table.groupby("condition", sort=False):
        means = of.groupby("policy.max_suspend_s").mean(numeric_only=True)
        rows.append(
            [
                name,
                f"{means.loc[math.inf, 'suspended_share']:.0%}",
                f"{means.loc[math.inf, 'ttft_s.mean']:.2f}",
                *(_times(_repaired(of, limit_s)) for limit_s in suspension.LIMITS_S[1:]),
                *(f"{means.loc[limit_s, 'attainment']:.1%}" for limit_s in shown),
            ]
        )
    return table_of(heads, rows)


def _drawn(table: pd.DataFrame) -> str:
    means = table.pivot(index="condition", columns="policy.max_suspend_s", values="ttft_s.mean")
    words = []
    for limit_s in suspension.DRAWN_LIMITS_S[1:]:
        ratios = means[math.inf] / means[limit_s]
        words.append(f"{ratios.min():.2f} to {ratios.max():.2f} with {_limit(limit_s)}, median {ratios.median():.2f}")
    return (
        f"{len(means)} conditions drawn at random (`experiments.suspension.random_conditions`: class shares, an SLO of "
        "0.3 to 60 s for each class whatever its length, KV memory, places, burstiness, loads of 0.8 to 1.1; "
        f"{suspension.DRAWN_REQUESTS} requests, one seed each) do not double it either: the mean without a bound over "
        f"that with one is {'; '.join(words)}."
    )


def _trade(table: pd.DataFrame) -> str:
    heads = ["", "bound", "all", *CLASSES, "TTFT mean [s]", "p99 [s]", "longest suspended [s]"]
    rows = []
    for name in SHOWN:
        means = table[table.condition == name].groupby("policy.max_suspend_s").mean(numeric_only=True)
        for limit_s in suspension.LIMITS_S:
            row = means.loc[limit_s]
            rows.append(
                [
                    name,
                    _limit(limit_s),
                    f"{row['attainment']:.1%}",
                    *(f"{row[f'attainment_by_class.{one}']:.1%}" for one in CLASSES),
                    f"{row['ttft_s.mean']:.2f}",
                    f"{row['ttft_s.p99']:.1f}",
                    f"{row['suspended_s.max']:.1f}",
                ]
            )
    return table_of(heads, rows)


# ---------------------------------------------------------------- numbers


def _paired(table: pd.DataFrame, name: str | float, against: str | float) -> pd.Series:
    """The mean TTFT of one policy over another's, seed by seed."""
    means = table.pivot(index="seed", columns="policy", values="ttft_s.mean")
    return means[name] / means[against]


def _repaired(of: pd.DataFrame, limit_s: float) -> pd.Series:
    """The mean TTFT without a bound over that with one, seed by seed."""
    means = of.pivot(index="seed", columns="policy.max_suspend_s", values="ttft_s.mean")
    return means[math.inf] / means[limit_s]


def _times(ratios: pd.Series) -> str:
    return f"{ratios.mean():.2f} ± {half_width(ratios.tolist()):.2f}"


def _limit(limit_s: float) -> str:
    return "none" if math.isinf(limit_s) else f"{limit_s:g} s"


def _ratio(held: pd.DataFrame, threshold: int, limit_s: float = math.inf) -> float:
    return float(_paired(held, f"{threshold} {limit_s:g}", "none").mean())


def _less(held: pd.DataFrame, threshold: int, limit_s: float = math.inf) -> float:
    """By what share the mean time between tokens is shorter than without suspension."""
    means = held.groupby("policy")["tbt_mean_s.mean"].mean()
    return float(1.0 - means[f"{threshold} {limit_s:g}"] / means["none"])


def _extremes(orders: pd.DataFrame) -> str:
    """Where a bound helps the mean most, and where it hurts most."""
    found = {
        (name, limit_s): float(_repaired(of, limit_s).mean())
        for name, of in orders.groupby("condition", sort=False)
        for limit_s in suspension.LIMITS_S[1:]
        if not str(name).startswith("equal")
    }
    (best, best_s), (worst, worst_s) = max(found, key=found.__getitem__), min(found, key=found.__getitem__)
    return (
        f"Where lengths differ the mean does not double: here a bound makes it at most {found[best, best_s]:.2f} times "
        f"smaller ({best}, {best_s:g} s), and at worst {1.0 / found[worst, worst_s]:.1f} times larger ({worst}, "
        f"{worst_s:g} s)."
    )


def _repair(orders: pd.DataFrame, condition: str, limit_s: float) -> float:
    return float(_repaired(orders[orders.condition == condition], limit_s).mean())


def _points(orders: pd.DataFrame, condition: str, limit_s: float, name: str = "") -> float:
    """Points of attainment that a bound costs, of one class or of all."""
    column = f"attainment_by_class.{name}" if name else "attainment"
    means = orders[orders.condition == condition].groupby("policy.max_suspend_s")[column].mean()
    return float(100.0 * (means[math.inf] - means[limit_s]))
