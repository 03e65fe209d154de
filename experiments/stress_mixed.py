"""Sessions and a burst of long documents on one engine or two tracks: `python -m experiments.stress_mixed`.

200 online sessions (prompts of 200 to 1500 tokens, streaming answers, targets TTFT < 0.3 s and TBT < 30 ms) and, at
30 s, 20 prompts of 64k tokens (`workload=stress_mixed`). Llama-3-8B on four H100s at TP 2: two instances of one pool,
or one of each track. Compared with the table that a production write-up published in October 2026. Writes the table,
and the figure `docs/img/stress_mixed.png`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flowsim import Cluster, LatencyModel, Pool, Result, load_profile, simulate
from flowsim.check import check_result
from flowsim.hybrid import HybridChunked
from flowsim.router import FewestRequests, TwoTrack
from flowsim.tokens import token_times_s
from flowsim.workload import stress_mixed

FIGURE = Path(__file__).resolve().parents[1] / "docs" / "img" / "stress_mixed.png"
BURST_S = 30.0
WHOLE = 70_000  # a budget that takes a document and every decode in one step
LATENCY = LatencyModel(load_profile("llama3-8b", "h100"), tp=2)
Floats = npt.NDArray[np.float64]


def one_pool(**policy: Any) -> tuple[Cluster, Any]:
    pool = Pool(instances=2, decode="here", pass_tokens=WHOLE, policy=HybridChunked(**policy))
    return Cluster(pools={"engine": pool}), FewestRequests()


def two_tracks(tokens: int) -> tuple[Cluster, Any]:
    tracks = {"realtime": HybridChunked(tokens=tokens), "batch": HybridChunked(tokens=8192, chunk=8192)}
    pools = {name: Pool(decode="here", policy=policy) for name, policy in tracks.items()}
    return Cluster(pools=pools), TwoTrack(threshold_tokens=4096)


SYSTEMS: Mapping[str, tuple[Cluster, Any]] = {
    "whole prompts, one pool": one_pool(tokens=WHOLE, chunk=None),
    "chunks of 512, budget 2048, one pool": one_pool(tokens=2048),
    "chunks of 512, budget 512, one pool": one_pool(tokens=512),
    "the same, a quarter for the oldest after 20 s": one_pool(tokens=512, age_s=20.0),
    "the same, LIFO": one_pool(tokens=512, order="interactive_lifo"),
    "two tracks, budgets 512 and 8192": two_tracks(512),
    "two tracks, budgets 1024 and 8192": two_tracks(1024),
}
DRAWN = (0, 1, 2, 6)


def main() -> None:
    names = ("system", "online TTFT p50 / p99 [s]", "online TBT p99 / max [ms]", "targets met", "documents done [s]",
             "document tokens/s", "busy in the burst")  # fmt: skip
    print("| " + " | ".join(names) + " |")
    print("|---" * len(names) + "|")
    results = {}
    for name, (cluster, router) in SYSTEMS.items():
        results[name] = result = run(cluster, router)
        print(f"| {name} | " + " | ".join(figures(result)) + " |", flush=True)
    draw({list(results)[place]: list(results.values())[place] for place in DRAWN})


def run(cluster: Cluster, router: Any) -> Result:
    """One system on the workload, its laws checked."""
    workload = stress_mixed(documents_at_s=BURST_S)
    policy = next(iter(cluster.pools.values())).policy
    assert policy is not None
    result = simulate(workload, policy=policy, latency=LATENCY, cluster=cluster, router=router)
    check_result(result, cluster.hardware(LATENCY))
    return result


def figures(result: Result) -> list[str]:
    """The row of one system: of online requests there between the burst and the last document's first token."""
    table = result.requests
    documents = table[table.slo_class == "document"]
    until_s = float(documents.first_token_s.max())
    online = table[(table.slo_class == "online") & (table.arrival_s < until_s) & (table.finish_s > BURST_S)]
    _, gaps_s = gaps(result, BURST_S, until_s)
    met = (online.met_slo == True) & (online.met_tbt == True)  # noqa: E712
    ttft_s, p99_s = online.ttft_s, np.percentile(gaps_s, 99)
    tokens = documents.prompt_tokens.sum() / (until_s - BURST_S)
    return [
        f"{ttft_s.median():.3f} / {ttft_s.quantile(0.99):.3f}",
        f"{1e3 * p99_s:.0f} / {1e3 * gaps_s.max():.0f}",
        f"{met.mean():.1%}",
        f"{documents.ttft_s.median():.1f} / {documents.ttft_s.max():.1f}",
        f"{tokens:,.0f}",
        f"{busy(result, BURST_S, until_s):.0%}",
    ]


def gaps(result: Result, from_s: float, to_s: float) -> tuple[Floats, Floats]:
    """When each online token came out, and the time since the one before it, in a window."""
    table, tables = result.tables["requests"], result.tables
    times = token_times_s(tables["steps"], tables["tokens"], table["first_token_s"])
    online = [row for row in times if table["slo_class"][row] == "online"]
    at_s = np.concatenate([times[row][1:] for row in online])
    gaps_s = np.concatenate([np.diff(times[row]) for row in online])
    inside = (at_s >= from_s) & (at_s < to_s)
    return at_s[inside], gaps_s[inside]


def busy(result: Result, from_s: float, to_s: float) -> float:
    """The share of a window in which the instances computed."""
    segments = result.segments
    overlap_s = np.minimum(segments.end_s, to_s) - np.maximum(segments.start_s, from_s)
    return float(overlap_s.clip(lower=0.0).sum() / (to_s - from_s) / result.run["instances"])


def draw(results: Mapping[str, Result]) -> None:
    """TTFT and TBT of online requests over time, a column of panels for each system."""
    from flowsim.report.style import PAGE_IN, figure_of, save, style

    with style():
        figure = figure_of(PAGE_IN, 0.55)
        axes = figure.subplots(2, len(results), sharex=True, sharey="row")
        for column, (name, result) in enumerate(results.items()):
            online = result.requests[result.requests.slo_class == "online"]
            at_s, gaps_s = gaps(result, 0.0, np.inf)
            axes[0, column].scatter(online.arrival_s, online.ttft_s, s=1.5, color="0.25", linewidths=0)
            bins = np.arange(0.0, 121.0, 0.5)
            place = np.digitize(at_s, bins) - 1
            largest_s = [gaps_s[place == one].max() if (place == one).any() else np.nan for one in range(len(bins))]
            axes[1, column].step(bins, largest_s, where="post", color="0.25", linewidth=0.8)
            for row, target_s in enumerate((0.3, 0.03)):
                axes[row, column].axhline(target_s, color="#d55e00", linewidth=0.8, linestyle="--")
                axes[row, column].axvline(BURST_S, color="0.6", linewidth=0.6)
                axes[row, column].set_yscale("log")
            axes[0, column].set_title(name.replace(", ", ",\n", 1).replace(" (", "\n("), fontsize=7)
            axes[1, column].set_xlabel("time [s]")
        axes[0, 0].annotate("documents arrive", (BURST_S, 0.0148), (3, 0), textcoords="offset points", size=6)
        axes[0, 0].annotate("target", (119, 0.32), ha="right", size=6, color="#d55e00")
        axes[0, 0].set(xlim=(0, 120), ylabel="TTFT [s]")
        axes[1, 0].set_ylabel("largest TBT\nin half a second [s]")
        save(figure, FIGURE)


if __name__ == "__main__":
    main()
