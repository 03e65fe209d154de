"""Routers before four equal instances, under two policies: `python -m experiments.routing`.

The workload is `mixed`, 5000 requests run to drain, Llama-3-8B on four A100s; the seed of arrivals and lengths is the
same for all. The number is attainment, overall, with the p99 TTFT in seconds behind it.
"""

from __future__ import annotations

from flowsim.check import check_result
from flowsim.config import build, compose

ROUTERS = ("round_robin", "power_of_two", "fewest_requests", "least_work", "slack_aware")
RATES_RPS = (26.0, 30.0, 33.0)


def main() -> None:
    for policy in ("fcfs", "flowprefill"):
        print(f"| {policy} | " + " | ".join(f"{rate_rps:g} req/s" for rate_rps in RATES_RPS) + " |")
        print("|---" * (1 + len(RATES_RPS)) + "|")
        for router in ROUTERS:
            cells = [cell(policy, router, rate_rps) for rate_rps in RATES_RPS]
            print(f"| `{router}` | " + " | ".join(cells) + " |", flush=True)
        print()


def cell(policy: str, router: str, rate_rps: float) -> str:
    """Attainment and p99 TTFT of one run, its laws checked."""
    overrides = [f"policy={policy}", f"router={router}", "cluster.instances=4", f"workload.rate_rps={rate_rps}"]
    setup = build(compose(overrides))
    result = setup.run()
    check_result(result, setup.latency)
    figures = result.summary()
    return f"{figures['attainment']:.1%} ({figures['ttft_s']['p99']:.1f})"


if __name__ == "__main__":
    main()
