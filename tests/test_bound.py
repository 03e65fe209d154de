"""The upper bound against brute force, against what any schedule really takes, and against every policy's runs."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow
from toys import toy_latency, workload

from flowsim import LatencyModel, PrefillOnly, Stops, load_profile, simulate
from flowsim.bound import goodput_bound, least_busy_s, on_time_bound
from flowsim.config import CONF, compose, make
from flowsim.workload import mixed

SECOND = toy_latency(1.0)  # a token takes a second
A100 = LatencyModel(load_profile("llama3-8b", "a100"))
JOBS = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=7)
FEW = settings(deadline=None, max_examples=60)


def jobs_to_requests(jobs):
    return workload(*[(float(at), tokens, float(slo)) for at, tokens, slo in sorted(jobs, key=lambda job: job[0])])


def feasible(jobs, instances):
    """Whether all of these can be on time: a flow from jobs to seconds, at most one instance for a job at a time."""
    horizon = max(at + slo for at, _, slo in jobs)
    source, sink = len(jobs) + horizon, len(jobs) + horizon + 1
    arcs = [(source, number, tokens) for number, (_, tokens, _) in enumerate(jobs)]
    arcs += [
        (number, len(jobs) + second, 1) for number, (at, _, slo) in enumerate(jobs) for second in range(at, at + slo)
    ]
    arcs += [(len(jobs) + second, sink, instances) for second in range(horizon)]
    rows, columns, capacity = zip(*arcs, strict=True)
    graph = csr_matrix((np.array(capacity, dtype=np.int32), (rows, columns)), shape=(sink + 1, sink + 1))
    return maximum_flow(graph, source, sink).flow_value == sum(tokens for _, tokens, _ in jobs)


def brute_force(jobs, instances=1):
    """The most jobs that can be on time, by trying every set of them."""
    sets = (chosen for size in range(len(jobs), 0, -1) for chosen in itertools.combinations(jobs, size))
    return next((len(chosen) for chosen in sets if feasible(chosen, instances)), 0)


@FEW
@given(JOBS)
def test_the_integral_bound_of_one_instance_is_the_best_of_all_subsets(jobs):
    bound = on_time_bound(jobs_to_requests(jobs), SECOND, batching="alone", solution="whole")
    assert bound.on_time == brute_force(jobs)


@FEW
@given(JOBS, st.integers(1, 3))
def test_the_relaxed_bound_is_never_below_the_best_of_all_subsets(jobs, instances):
    bound = on_time_bound(jobs_to_requests(jobs), SECOND, instances=instances, batching="alone")
    assert brute_force(jobs, instances) <= bound.on_time <= len(jobs)


def test_a_case_worked_out_by_hand():
    # 4 s by 5; 2 s within 1..4; 2 s within 1..5; 1 s by 6. Of the 7 s that are due by 5 only 5 can be done.
    requests = workload((0.0, 4, 5.0), (1.0, 2, 3.0), (1.0, 2, 4.0), (5.0, 1, 1.0))
    bound = on_time_bound(requests, SECOND, batching="alone")
    assert (bound.on_time, bound.requests, bound.impossible) == (3, 4, 0)
    assert on_time_bound(requests, SECOND, instances=2, batching="alone").on_time == 4


def test_what_is_late_even_alone_is_impossible_and_what_has_no_slo_is_not_counted():
    requests = workload((0.0, 4, 3.0), (0.0, 4), (0.0, 4, 4.0))
    bound = on_time_bound(requests, SECOND)
    assert (bound.requests, bound.on_time, bound.impossible) == (2, 1, 1)
    assert on_time_bound(workload((0.0, 4)), SECOND).attainment is None


def test_exactly_on_time_is_on_time():
    requests = [*workload((0.0, 3, 3.0), (3.0, 5, 5.0), (8.0, 1, 1.0))]
    assert on_time_bound(requests, SECOND, batching="alone").on_time == 3


@pytest.mark.parametrize(("model", "gpu"), [("llama3-8b", "a100"), ("qwen3-30b-a3b", "rtxpro6000")])
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_no_batches_or_chunks_take_less_than_the_least_busy_seconds_of_their_prompts(model, gpu, data):
    latency = _latency(model, gpu)
    prompts = data.draw(st.lists(st.integers(1, 12_000), min_size=1, max_size=5))
    least_s = least_busy_s(prompts, latency, "perfect").sum()
    left, busy_s = list(prompts), 0.0
    while any(left):
        cuts = [data.draw(st.integers(0, tokens)) if data.draw(st.booleans()) else tokens for tokens in left]
        batch = [(cut, whole - rest) for cut, rest, whole in zip(cuts, left, prompts, strict=True) if cut]
        if batch:
            busy_s += latency.timeline(batch).total_s
        left = [rest - cut for rest, cut in zip(left, cuts, strict=True)]
    assert busy_s >= least_s * (1.0 - 1e-9)


_latencies = {}


def _latency(model, gpu):
    if (model, gpu) not in _latencies:
        _latencies[model, gpu] = LatencyModel(load_profile(model, gpu))
    return _latencies[model, gpu]


@pytest.mark.parametrize("policy", sorted(path.stem for path in (CONF / "policy").glob("*.yaml")))
def test_no_shipped_policy_is_above_the_bound(policy):
    for instances, rate_rps in ((1, 14.0), (2, 30.0)):
        requests = mixed(rate_rps=rate_rps, num_requests=150, seed=4)
        result = simulate(
            requests,
            policy=make(compose([f"policy={policy}"]), "policy"),
            latency=A100,
            cluster=PrefillOnly(instances=instances),
        )
        bound = on_time_bound(requests, A100, instances=instances)
        assert int(result.requests.met_slo.sum()) <= bound.on_time


def test_batching_more_instances_and_looser_slos_never_lower_the_bound():
    requests = mixed(rate_rps=16.0, num_requests=400, seed=1)
    alone = on_time_bound(requests, A100, batching="alone").on_time
    loose = on_time_bound(mixed(rate_rps=16.0, num_requests=400, seed=1, slo_scale=2.0), A100, batching="alone")
    assert alone <= on_time_bound(requests, A100, batching="perfect").on_time
    assert alone <= on_time_bound(requests, A100, instances=2, batching="alone").on_time
    assert alone <= loose.on_time


def test_stops_do_not_change_the_bound():
    requests = mixed(rate_rps=16.0, num_requests=200, seed=1)
    fine = A100.bound(pass_tokens=8192, stops=Stops.OPERATOR)
    assert (
        on_time_bound(requests, fine, batching="alone").on_time
        == on_time_bound(requests, A100, batching="alone").on_time
    )


def test_the_goodput_bound_is_where_the_attainment_bound_crosses_the_target():
    def at(rate_rps):
        return mixed(rate_rps=rate_rps, num_requests=300, seed=2)

    rate_rps = goodput_bound(at, A100, batching="alone", start_rps=30.0, tolerance=0.02)
    assert on_time_bound(at(rate_rps), A100, batching="alone").attainment < 0.9
    assert on_time_bound(at(rate_rps / 1.02), A100, batching="alone").attainment >= 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batching": "perfetc"}, "perfect"),
        ({"solution": "integral"}, "whole"),
        ({"instances": 0}, "at least 1"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        on_time_bound(workload((0.0, 4, 5.0)), SECOND, **options)
    with pytest.raises(ValueError, match="no schedule"):
        goodput_bound(lambda _rate_rps: workload((0.0, 4, 3.0)), SECOND)
    with pytest.raises(ValueError, match="target"):
        goodput_bound(lambda _rate_rps: workload((0.0, 4, 3.0)), SECOND, target=0.0)


def flowsim_command(folder, *arguments):
    command = [sys.executable, "-m", "flowsim", f"hydra.run.dir={folder}", "report=none", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_of_requests_at_one_moment_there_is_no_load_and_the_bound_is_json_all_the_same(tmp_path):
    done = flowsim_command(tmp_path, "task=bound", "workload.num_requests=1")
    assert done.returncode == 0, done.stderr
    assert "nan" not in done.stdout
    found = json.loads((tmp_path / "bound.json").read_text(), parse_constant=pytest.fail)
    assert [bound["load"] for bound in found["bounds"]] == [None, None]


def test_the_command_shows_the_policy_beside_both_bounds(tmp_path):
    done = flowsim_command(tmp_path, "task=bound", "workload.num_requests=200", "workload.rate_rps=14")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "bound.json").read_text())
    alone, perfect = found["bounds"]
    assert found["policy_on_time"] <= perfect["on_time"] <= perfect["requests"] == 200
    assert alone["on_time"] <= perfect["on_time"]
    assert "any without batching, at most" in done.stdout


@pytest.mark.parametrize("argument", ["workload=closed_loop", "cluster.jitter_sigma=0.1"])
def test_the_command_refuses_what_it_cannot_bound(tmp_path, argument):
    done = flowsim_command(tmp_path, "task=bound", argument)
    assert done.returncode == 2
    assert "task=bound" in done.stderr
