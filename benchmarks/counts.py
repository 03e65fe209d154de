"""What a request costs without a clock: `python -m benchmarks.counts`.

Counts the calls of Python functions and the bytecodes that the interpreter goes through in one `simulate` of workload
`mixed` under `flowprefill` (Llama-3-8B, A100), and says for which purpose. The counts are the same on every machine
with the same Python and libraries, however busy it is; beside them stand those of a bare SimPy timeout.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import simpy

from flowsim import ComposedPolicy, LatencyModel, SLOAware, load_profile, simulate
from flowsim.workload import mixed

# By file, and within it by function where one serves another purpose.
PURPOSES = {
    "the event queue": {"events.py", "core.py:step", "core.py:schedule"},
    "arriving and ending: source, router, proxy": {
        "source.py",
        "cluster.py",
        "proxied.py",
        "router.py",
        "instance.py:submit",
        "instance.py:join",
        "core.py:__init__ of Job",
    },
    "deciding: order and queue": {
        "policy.py",
        "queue.py",
        "sortedlist.py",
        "instance.py:_wake",
        "instance.py:_decide",
        "instance.py:_ask",
        "view.py:left_s",
    },
    "forming and checking batches": {"batching.py", "contract.py", "view.py", "core.py", "kv.py:blocks"},
    "predicting and laying out": {"latency.py", "timeline.py", "curves.py"},
    "starting, stopping, KV": {"instance.py", "stage.py", "kv.py"},
    "writing down": {"log.py", "record.py"},
    "results": {"metrics.py", "tabulate.py", "load.py", "keep.py", "tables.py", "sim.py"},
}


def purpose(code: CodeType) -> str:
    """What a function is for."""
    file = code.co_filename.replace("\\", "/").rpartition("/")[2]
    if file == "core.py" and code.co_qualname == "Job.__init__":
        return "arriving and ending: source, router, proxy"
    for place in (f"{file}:{code.co_name}", file):
        for name, places in PURPOSES.items():
            if place in places:
                return name
    return "else"


def counted(run: Callable[[], Any]) -> tuple[Counter[CodeType], Counter[CodeType]]:
    """Calls and bytecodes of each function while something runs."""
    calls: Counter[CodeType] = Counter()
    bytecodes: Counter[CodeType] = Counter()

    def traced(frame: FrameType, event: str, _argument: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        (calls if event == "call" else bytecodes)[frame.f_code] += event in ("call", "opcode")
        return traced

    sys.settrace(traced)
    try:
        run()
    finally:
        sys.settrace(None)
    return calls, bytecodes


def timeouts(count: int) -> None:
    """That many bare timeouts of SimPy, one after the other."""
    env = simpy.Environment()

    def ticking() -> Iterator[simpy.Event]:
        for _ in range(count):
            yield env.timeout(1.0)

    env.process(ticking())
    env.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-requests", type=int, default=5_000)
    parser.add_argument("--rates", type=float, nargs="*", default=[6.0, 24.0])
    parser.add_argument("--functions", type=int, default=0, help="list so many of the costliest functions too")
    options = parser.parse_args()
    count = options.num_requests
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    policy = ComposedPolicy("slack_edf", SLOAware(), "operator")
    calls, bytecodes = counted(lambda: timeouts(count))
    print(f"a bare timeout: {calls.total() / count:.1f} calls, {bytecodes.total() / count:.0f} bytecodes")
    for rate_rps in options.rates:
        requests = mixed(rate_rps=rate_rps, num_requests=count)
        calls, bytecodes = counted(lambda: simulate(requests, policy=policy, latency=latency))  # noqa: B023
        print(f"\nat {rate_rps:g} requests/s, a request {'calls':>31} {'bytecodes':>10} {'share':>6}")
        rows: dict[str, list[float]] = {name: [0.0, 0.0] for name in (*PURPOSES, "else")}
        for place, column in enumerate((calls, bytecodes)):
            for code, number in column.items():
                rows[purpose(code)][place] += number / count
        total = sum(row[1] for row in rows.values())
        for name, (called, codes) in rows.items():
            print(f"{name:44} {called:12.1f} {codes:10.0f} {codes / total:6.1%}")
        print(f"{'in all':44} {calls.total() / count:12.1f} {total:10.0f}")
        for code, number in bytecodes.most_common(options.functions):
            where = f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno} {code.co_name}"
            print(f"  {where:42} {calls[code] / count:12.2f} {number / count:10.1f}")


if __name__ == "__main__":
    main()
