"""What makes a run fast, without a clock: few events and decisions a request, and nothing imported before its use."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import pytest
from toys import checked

from flowsim import ComposedPolicy, LatencyModel, Result, SLOAware, TokenBudget, load_profile, simulate
from flowsim.check import check_result
from flowsim.config import build, compose
from flowsim.workload import lognormal, mixed

HEAVY = {"matplotlib", "scipy", "pandas", "hydra", "omegaconf", "joblib"}
SEGMENTS = ComposedPolicy("slack_edf", SLOAware(), "operator")


def a100() -> LatencyModel:
    return LatencyModel(load_profile("llama3-8b", "a100"))


def decoded(overrides: list[str], rate_rps: float) -> Result:
    """A run of 300 requests with 200 output tokens on average."""
    setup = build(compose([*overrides, "workload.num_requests=1"]))
    stream = random.Random(0)
    requests = [
        replace(request, output_tokens=1 + int(stream.expovariate(1.0 / 199)))
        for request in lognormal(rate_rps=rate_rps, num_requests=300, mean_tokens=600)
    ]
    result = replace(setup, requests=requests).run()
    check_result(result)
    return result


def modules_after(code: str) -> set[str]:
    """The top-level packages that a fresh interpreter has imported after some code."""
    code += "; print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", f"import sys; {code}"], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    ("rate_rps", "events", "decisions"),
    [(2.0, 2.3, 2.0), (6.0, 2.9, 2.3), (24.0, 2.0, 1.9)],
)
def test_a_request_costs_few_events_and_decisions_at_any_load(rate_rps, events, decisions):
    result = checked(mixed(rate_rps=rate_rps, num_requests=1500), SEGMENTS, a100())
    figures = result.summary()
    assert figures["events_per_request"] <= events
    assert result.run["decisions"] / figures["requests"] <= decisions


@pytest.mark.parametrize("rate_rps", [2.0, 6.0, 24.0])
def test_a_request_costs_few_calls_of_python_functions_at_any_load(rate_rps):
    requests, latency = mixed(rate_rps=rate_rps, num_requests=1500), a100()
    simulate(requests, policy=SEGMENTS, latency=latency)  # what is computed once for each length is
    calls = 0

    def counted(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        simulate(requests, policy=SEGMENTS, latency=latency)
    finally:
        sys.setprofile(before)
    assert calls / len(requests) <= 120  # 84 to 110 with CPython 3.11


def test_a_segment_costs_one_event_and_an_arrival_one_and_a_flag_one():
    result = checked(mixed(rate_rps=6.0, num_requests=1500), SEGMENTS, a100())
    segments, flags = len(result.tables["segments"]["batch"]), len(result.tables["preemptions"]["batch"])
    assert result.run["events"] <= 1500 + segments + flags


def test_a_chunk_costs_one_event_and_an_arrival_one():
    result = checked(
        mixed(rate_rps=6.0, num_requests=500), ComposedPolicy("arrival", TokenBudget(2048), "pass"), a100()
    )
    assert result.run["events"] <= 500 + len(result.tables["segments"]["batch"])


def test_a_step_of_a_colocated_engine_costs_one_event_and_one_decision_and_an_arrival_one_event():
    result = decoded(["cluster=colocated", "policy=vllm"], rate_rps=3.0)
    steps, requests = result.tables["steps"]["steps"].sum(), result.summary()["requests"]
    assert result.run["events"] <= requests + len(result.tables["segments"]["batch"])
    assert result.run["decisions"] <= requests + steps


def test_a_disaggregated_cluster_costs_an_event_an_arrival_and_a_segment_and_two_a_transfer_however_many_tokens():
    result = decoded(["cluster=pd", "policy=flowprefill"], rate_rps=5.0)
    segments, transfers = len(result.tables["segments"]["batch"]), len(result.tables["transfers"]["request"])
    figures = result.summary()
    assert result.run["events"] <= figures["requests"] + segments + 2 * transfers
    assert figures["events_per_request"] <= 6.0
    assert result.run["decisions"] / figures["requests"] <= 4.2
    assert figures["decode"]["steps"] > 2 * result.run["events"]  # a run of steps of the same sequences is one event


def test_an_instance_with_nothing_to_run_asks_nobody():
    requests = mixed(rate_rps=0.001, num_requests=20)  # each long gone when the next arrives
    assert checked(requests, SEGMENTS, a100()).run["decisions"] == 20


def test_importing_flowsim_imports_nothing_heavy():
    assert not modules_after("import flowsim") & HEAVY


def test_help_imports_nothing_heavy():
    code = "import runpy; sys.argv = ['flowsim', '--help']; runpy.run_module('flowsim', run_name='__main__')"
    assert not modules_after(code) & HEAVY


def test_a_run_without_a_report_draws_nothing_and_needs_no_data_frames(tmp_path):
    arguments = ["flowsim", "workload.num_requests=20", "report=none", "quiet=true", f"hydra.run.dir={tmp_path}"]
    code = f"import runpy; sys.argv = {arguments!r}; sys.exit = print; runpy.run_module('flowsim', run_name='__main__')"
    assert not modules_after(code) & {"matplotlib", "scipy", "pandas", "joblib"}
