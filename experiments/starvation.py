"""One long request under steady urgent load, with and without `max_suspend_s`: `python -m experiments.starvation`.

A prompt of 16,000 tokens (TTFT SLO 6 s) arrives at 0; from then on a prompt of 64 tokens (SLO 0.25 s) arrives every
25 ms for a minute, 90 % of what the GPU can do. Llama-3-8B on one A100, S-EDF with operator stops and no batching.
"""

from __future__ import annotations

import math

from flowsim import Alone, ComposedPolicy, LatencyModel, Request, Stops, load_profile, simulate
from flowsim.check import check_result


def main() -> None:
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    urgent = [
        Request(id=number, arrival_s=0.025 * number, prompt_tokens=64, ttft_slo_s=0.25, slo_class="text")
        for number in range(1, 2401)
    ]
    long = Request(id=0, arrival_s=0.0, prompt_tokens=16_000, ttft_slo_s=6.0, slo_class="file")
    alone = latency.bound(pass_tokens=8192, stops=Stops.OPERATOR).whole(64)
    load = alone.total_s / 0.025
    print(f"urgent load {load:.1%}")
    print("| `max_suspend_s` | file: TTFT [s] | file: suspended [s] | text: attainment | text: TTFT p99 [s] |")
    print("|---|---|---|---|---|")
    for limit_s in (math.inf, 5.0, 1.0, 0.2):
        policy = ComposedPolicy("slack_edf", Alone(), "operator", max_suspend_s=limit_s)
        result = simulate([long, *urgent], policy=policy, latency=latency)
        check_result(result, latency)
        figures, file = result.summary(), result.requests.iloc[0]
        attained, p99_s = figures["attainment_by_class"]["text"], figures["ttft_s_by_class"]["text"]["p99"]
        print(f"| {limit_s:g} | {file.ttft_s:.2f} | {file.suspended_s:.2f} | {attained:.1%} | {p99_s:.3f} |")


if __name__ == "__main__":
    main()
