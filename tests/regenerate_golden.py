"""Writes `golden/policies.csv` anew: `python -m tests.regenerate_golden` from the checkout.

Only where results are meant to move: look at the difference, and say in CHANGELOG.md what moved and why.
"""

from __future__ import annotations

import csv
from pathlib import Path

from flowsim import LatencyModel, Result, load_profile, simulate
from flowsim.config import CONF, compose, make
from flowsim.workload import mixed

GOLDEN = Path(__file__).parent / "golden" / "policies.csv"
COLUMNS = ("policy", "request", "start_s", "first_token_s", "preemptions")
POLICIES = sorted(path.stem for path in (CONF / "policy").glob("*.yaml"))


def golden_run(policy: str) -> tuple[Result, LatencyModel]:
    """Twelve requests of `mixed` on the A100 under a shipped policy, three times as fast as they can be served."""
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    requests = mixed(rate_rps=30.0, num_requests=12, seed=7)
    return simulate(requests, policy=make(compose([f"policy={policy}"]), "policy"), latency=latency), latency


def golden_rows(policy: str, result: Result) -> list[tuple[str, int, float, float, int]]:
    """The rows of one policy."""
    columns = [result.tables["requests"][name].tolist() for name in ("id", *COLUMNS[2:])]
    return [(policy, *row) for row in zip(*columns, strict=True)]


def main() -> None:
    with GOLDEN.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for policy in POLICIES:
            writer.writerows(golden_rows(policy, golden_run(policy)[0]))


if __name__ == "__main__":
    main()
