"""Instances that fail: what they had is computed again elsewhere or later, and nothing is lost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import toy_latency, workload

from flowsim import Alone, ComposedPolicy, Pool, Result, SLOAware, TokenBudget, simulate
from flowsim.check import check_result
from flowsim.config import build, compose
from flowsim.pool import Failure, Link
from flowsim.router import LeastWork, RoundRobin

POLICIES = {
    "fcfs": lambda: ComposedPolicy("arrival", Alone(), "request"),
    "chunked": lambda: ComposedPolicy("arrival", TokenBudget(200), "pass"),
    "preemptive": lambda: ComposedPolicy("slack_edf", SLOAware(300), "operator"),
    "at_stops": lambda: ComposedPolicy("slack_edf", SLOAware(300), "layer", consult="stops"),
}


def run(requests: list, pool: Pool, policy: str = "fcfs", router: object = None, **options: object) -> Result:
    """`simulate` with the laws of a run checked."""
    latency = toy_latency()
    result = simulate(requests, policy=POLICIES[policy](), latency=latency, cluster=pool, router=router, **options)
    check_result(result, latency)
    return result


def failing(*failures: tuple[float, int, float], instances: int = 2, **options: object) -> Pool:
    made = tuple(Failure(at_s=at_s, instance=instance, for_s=for_s) for at_s, instance, for_s in failures)
    return Pool(instances=instances, failures=made, **options)


def test_what_runs_on_an_instance_that_fails_starts_anew_on_another():
    result = run(workload((0.0, 10), (0.0, 4)), failing((6.0, 0, 100.0)))
    first = result.requests.iloc[0]
    assert (first.start_s, first.first_token_s, first.prefill_instance) == (0.0, 16.0, 1)
    assert (first.requeued, first.recomputed_tokens) == (1, 10)
    segment = result.segments[result.segments.ended == "failed"].iloc[0]
    assert (segment.instance, segment.start_s, segment.end_s) == (0, 0.0, 6.0)
    assert result.summary()["failures"] == {"count": 1, "down_s": 100.0, "requeued": 1, "recomputed_tokens": 10}


def test_what_waits_on_an_instance_that_fails_is_queued_elsewhere_and_recomputes_nothing():
    result = run(workload((0.0, 10), (0.0, 10), (1.0, 5), (1.0, 5)), failing((2.0, 0, 100.0)))
    table = result.requests
    assert table.prefill_instance.tolist() == [1, 1, 1, 1]
    assert table.requeued.tolist() == [1, 0, 1, 0]
    assert table.recomputed_tokens.tolist() == [10, 0, 0, 0]


def test_while_no_instance_is_up_requests_wait_at_the_proxy():
    result = run(workload((0.0, 10), (7.0, 3)), failing((5.0, 0, 15.0), instances=1))
    assert result.requests.start_s.tolist() == [0.0, 30.0]
    assert result.requests.first_token_s.tolist() == [30.0, 33.0]
    assert result.requests.requeued.tolist() == [1, 0]


def test_an_instance_that_is_down_gets_nothing_and_one_that_is_back_does():
    requests = workload(*[(float(second), 1) for second in range(40)])
    result = run(requests, failing((9.5, 1, 20.0)))
    sent = result.requests.prefill_instance
    assert (sent[10:30] == 0).all()
    assert set(sent[30:]) == {0, 1}


def test_chunks_done_and_suspended_batches_are_lost_with_the_memory_they_lay_in():
    chunked = run(workload((0.0, 500)), failing((450.0, 0, 1.0), instances=1), "chunked")
    # 200 + 200 tokens were done, and the last 100 were under way
    assert chunked.requests.recomputed_tokens.tolist() == [500]
    assert chunked.requests.first_token_s.tolist() == [951.0]
    paused = run(workload((0.0, 100, 5000.0), (31.0, 50, 60.0)), failing((60.0, 0, 1.0), instances=1), "preemptive")
    assert paused.requests.recomputed_tokens.tolist() == [100, 50]
    assert paused.requests.suspended_s[0] > 0.0


def test_a_client_that_was_requeued_still_gives_up():
    requests = workload((0.0, 50), (0.0, 50), (1.0, 5))
    requests[2] = type(requests[2])(id=2, arrival_s=1.0, prompt_tokens=5, abandon_s=20.0)
    result = run(requests, failing((10.0, 0, 100.0)))
    assert result.tables["requests"]["reason"].tolist() == [None, None, "abandoned"]


def test_without_failures_there_is_no_trace_of_them():
    result = run(workload((0.0, 5)), Pool())
    assert "failures" not in result.tables
    assert "requeued" not in result.tables["requests"]
    assert result.summary()["failures"] is None


def test_a_horizon_within_an_outage_counts_what_waits_as_unfinished():
    result = run(workload((0.0, 10), (7.0, 3)), failing((5.0, 0, 50.0), instances=1), horizon_s=20.0)
    assert result.requests.outcome.tolist() == ["unfinished", "unfinished"]


@st.composite
def outages(draw: st.DrawFn) -> Pool:
    """One to three instances, each with up to three failures that do not overlap."""
    instances = draw(st.integers(1, 3))
    failures = []
    for instance in range(instances):
        at_s = 0.0
        for gap_s, for_s in draw(st.lists(st.tuples(st.floats(0.5, 60.0), st.floats(0.5, 60.0)), max_size=3)):
            at_s += gap_s
            failures.append((at_s, instance, for_s))
            at_s += for_s
    return failing(*failures, instances=instances, kv_blocks=draw(st.sampled_from([60, 400, None])))


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(
    pool=outages(),
    rows=st.lists(
        st.tuples(st.floats(0.0, 20.0), st.integers(1, 900), st.sampled_from([60.0, 300.0, math.inf])), max_size=20
    ),
    router=st.sampled_from([RoundRobin, LeastWork]),
)
def test_whatever_fails_no_request_is_lost_and_the_run_ends(policy, pool, rows, router):
    arrivals = np.cumsum([row[0] for row in rows])
    requests = workload(*[(float(at), row[1], row[2]) for at, row in zip(arrivals, rows, strict=True)])
    result = run(requests, pool, policy, router())
    assert set(result.requests.outcome) <= {"finished", "rejected"}
    assert (result.requests.outcome == "finished").sum() == sum(
        -(-one.prompt_tokens // 16) <= (pool.kv_blocks or math.inf) for one in requests
    )
    assert run(requests, pool, policy, router()).requests.equals(result.requests)


def test_failures_are_read_from_the_configuration_and_come_back_from_files(tmp_path):
    overrides = [
        "cluster.instances=2",
        "cluster.failures=[{at_s: 5, instance: 1, for_s: 10}]",
        "workload.num_requests=200",
    ]
    setup = build(compose(overrides))
    result = setup.run()
    check_result(result, setup.latency)
    assert result.summary()["failures"]["requeued"] > 0
    result.save(tmp_path)
    again = Result.load(tmp_path)
    check_result(again, setup.latency)
    assert again.requests.equals(result.requests)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Failure(at_s=-1.0, instance=0, for_s=1.0), "at_s must be finite and at least 0"),
        (lambda: Failure(at_s=1.0, instance=0, for_s=0.0), "for_s finite and above 0"),
        (lambda: Pool(failures=[{"at_s": 1.0, "instance": 1, "for_s": 1.0}]), "the pool has instances 0 to 0"),
        (lambda: Pool(failures=[{"at": 1.0, "instance": 0, "for_s": 1.0}]), "unknown key of a failure 'at'"),
        (lambda: Pool(failures=[{"at_s": 1.0, "instance": 0}]), "a failure needs for_s too"),
        (lambda: failing((1.0, 0, 5.0), (3.0, 0, 1.0)), "instance 0 is down until 6 s already"),
        (
            lambda: failing((1.0, 0, 5.0), decode="here", expert_parallel=True, collective=Link()),
            "not of ranks that share experts",
        ),
    ],
)
def test_a_failure_that_cannot_be_says_why(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()
