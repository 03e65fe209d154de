"""One run of the common work in flowsim, as a process: `python -m benchmarks.one_flowsim POLICY COUNT`."""

from __future__ import annotations

import json
import sys
from time import perf_counter, process_time

from benchmarks.work import TTFT_SLO_S, prompts
from flowsim import ComposedPolicy, LatencyModel, Request, SLOAware, TokenBudget, load_profile, simulate

POLICIES = {
    "flowprefill": ComposedPolicy("slack_edf", SLOAware(), "operator"),
    "chunked_2k": ComposedPolicy("arrival", TokenBudget(2048), "pass"),
}


def main() -> None:
    name, count = sys.argv[1], int(sys.argv[2])
    requests = [
        Request(id=row, arrival_s=arrival_s, prompt_tokens=tokens, ttft_slo_s=TTFT_SLO_S)
        for row, (arrival_s, tokens) in enumerate(prompts(count))
    ]
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    began_s, began_cpu_s = perf_counter(), process_time()
    result = simulate(requests, policy=POLICIES[name], latency=latency)
    loop = {"wall_s": perf_counter() - began_s, "cpu_s": process_time() - began_cpu_s}
    figures = result.summary()
    print(json.dumps(loop | {"ttft_s": figures["ttft_s"]["mean"], "utilisation": figures["utilisation"]}))


if __name__ == "__main__":
    main()
