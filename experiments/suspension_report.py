"""The section of `docs/beyond.md` on bounded suspension, from the tables of `experiments.suspension`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from experiments import suspension
from experiments.beyond_markdown import table_of
from flowsim.study.attained import half_width

__all__ = ["section"]

CLASSES = ("text", "image", "search", "file")
SHOWN = ("`mixed`, 6 req/s", "`mixed`, 10 req/s", "10 req/s, at most 8 batches under way")


def section(tables: Mapping[str, pd.DataFrame]) -> str:
    """Its Markdown, not wrapped."""
    held, newest, orders = (tables[name] for name in suspension.STUDIES)
    return f"""
## Bounded suspension

A pull request to vLLM (vllm-project/vllm#44794, comment of July 2026) reports that suspending prefills without a bound
doubled the mean TTFT, 450 to 969 ms, and that a bound of 50 ms brought it to 412 ms (Qwen3-1.7B, four clients, random
prompts; it does not say how long, nor how often it was run). Where does that happen, and what does a bound cost?
`python -m experiments.suspension` makes these tables alone.

A TTFT is time queued, running and suspended, and a bound can only take from the last: where suspension is a share s of
all TTFT, the mean can at best become 1 / (1 - s) times smaller, and what is let go on makes others wait. So the mean
doubles only where most of it is suspension.

**Held back while others decode.** The pull request's rule suspends a prefill while many sequences decode, not for
somebody more urgent, and the GPU is then far from busy. {suspension.USERS} users who ask again at once, prompts of
{suspension.HELD_PROMPTS[0]} to {suspension.HELD_PROMPTS[1]} tokens, {suspension.HELD_OUTPUTS[0]} to
{suspension.HELD_OUTPUTS[1]} tokens out, vLLM's steps of 2048 tokens on Llama-3-8B and one A100; a prefill that has begun
is held back before each further chunk while at least so many of the four decode
({suspension.HELD_REQUESTS} requests, {len(suspension.SEEDS)} seeds, ratios paired by seed with 95 % intervals):

{_held(held)}

The effect is there, and stronger than reported: without a bound the mean TTFT is {_ratio(held, 3):.1f} times that of no
suspension with a threshold of 3, and {_ratio(held, 2):.1f} times with 2. A bound of 50 ms repairs most of it
({_ratio(held, 3, 0.05):.2f} and {_ratio(held, 2, 0.05):.2f} times), not all, as each prompt is held once for each chunk;
one of 1 s or more does nothing, for no hold would last longer. What the suspension is for is the time between tokens: it
falls by {_less(held, 3):.0%} at a threshold of 3 without a bound, and with 50 ms by {_less(held, 3, 0.05):.0%}.

**Newest first.** Where whatever comes runs at once and suspends what ran, nearly all TTFT is suspension. Equal prompts
of {suspension.NEWEST_TOKENS} tokens, one at a time, operator stops, the newest first
(`flowsim.hybrid.InteractiveLIFO`); with a bound towards 0 this becomes first come first served. Queueing theory has the
ratio of the two means, 2 / (2 - load) for Poisson arrivals and equal times of service (M/D/1, preemptive LIFO over FCFS):

{_newest(newest)}

So the mean doubles as the load goes to 1, 50 ms repair it, and here they cost nothing: more requests are on time, too.
A bound about as long as the waits it cuts (1 s at loads below 0.9) only makes more of them late.

**FlowPrefill's order.** S-EDF suspends for requests that are due earlier, which are the shorter ones in all workloads
here; shortest first has the least mean there is, so that every bound raises what it does not have to repair.
How much of all TTFT is suspension without a bound, and how many times smaller the mean is with one:

{_orders(orders)}

{_extremes(orders)} Suspended work does not fill the KV memory either: what waits and does not fit lets the suspended go
on, and with 40,000 tokens of KV less of the TTFT is suspension, not more. Orders that pause little (earliest deadline
first in overload, where the oldest is always due first) have nothing to repair.

The trade, in attainment of each class ({suspension.NUM_REQUESTS} requests, means of {len(suspension.SEEDS)} seeds):

{_trade(orders)}

Long requests gain what urgent ones lose, and there are more urgent ones. One case is different: where few batches may be
under way (`cluster.max_batches`), suspended ones hold the places that urgent requests would start in, and a bound of 1 s
gives {_gain(orders):+.1f} points of attainment at no cost to the mean. For a single long request under steady urgent load
a bound is what ends its starvation: 13.5 s without one and 1.6 s with 0.2 s ([policies.md](policies.md), "Starvation").
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
    heads = ["load", "suspended", "TTFT mean [s]", *(f"/ {_limit(limit_s)}" for limit_s in suspension.LIMITS_S[1:]),
             "theory", *(f"attained, {_limit(limit_s)}" for limit_s in shown)]  # fmt: skip
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
    heads = ["", "suspended", "TTFT mean [s]", *(f"/ {_limit(limit_s)}" for limit_s in suspension.LIMITS_S[1:]),
             "attained", *(f"{_limit(limit_s)}" for limit_s in suspension.LIMITS_S[1:])]  # fmt: skip
    rows = []
    for name, of in table.groupby("condition", sort=False):
        means = of.groupby("policy.max_suspend_s").mean(numeric_only=True)
        rows.append(
            [
                name,
                f"{means.loc[math.inf, 'suspended_share']:.0%}",
                f"{means.loc[math.inf, 'ttft_s.mean']:.2f}",
                *(_times(_repaired(of, limit_s)) for limit_s in suspension.LIMITS_S[1:]),
                *(f"{means.loc[limit_s, 'attainment']:.1%}" for limit_s in suspension.LIMITS_S),
            ]
        )
    return table_of(heads, rows)


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
    }
    (best, best_s), (worst, worst_s) = max(found, key=found.__getitem__), min(found, key=found.__getitem__)
    return (
        f"It does not double: at most a bound makes the mean {found[best, best_s]:.2f} times smaller "
        f"({best}, {best_s:g} s), and at worst it makes it {1.0 / found[worst, worst_s]:.1f} times larger ({worst}, "
        f"{worst_s:g} s)."
    )


def _gain(orders: pd.DataFrame) -> float:
    """Points of attainment that a bound of 1 s gives where few batches may be under way."""
    means = orders[orders.condition == SHOWN[-1]].groupby("policy.max_suspend_s").attainment.mean()
    return float(100.0 * (means[1.0] - means[math.inf]))
