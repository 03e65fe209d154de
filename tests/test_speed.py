"""What makes a run fast, without a clock: few events and decisions a request, and nothing imported before its use."""

from __future__ import annotations

import subprocess
import sys

import pytest
from toys import checked

from flowsim import ComposedPolicy, LatencyModel, SLOAware, TokenBudget, load_profile
from flowsim.workload import mixed

HEAVY = {"matplotlib", "scipy", "pandas", "hydra", "omegaconf", "joblib"}
SEGMENTS = ComposedPolicy("slack_edf", SLOAware(), "operator")


def a100() -> LatencyModel:
    return LatencyModel(load_profile("llama3-8b", "a100"))


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


def test_a_segment_costs_one_event_and_an_arrival_one_and_a_flag_one():
    result = checked(mixed(rate_rps=6.0, num_requests=1500), SEGMENTS, a100())
    segments, flags = len(result.tables["segments"]["batch"]), len(result.tables["preemptions"]["batch"])
    assert result.run["events"] <= 1500 + segments + flags


def test_a_chunk_costs_one_event_and_an_arrival_one():
    result = checked(
        mixed(rate_rps=6.0, num_requests=500), ComposedPolicy("arrival", TokenBudget(2048), "pass"), a100()
    )
    assert result.run["events"] <= 500 + len(result.tables["segments"]["batch"])


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
