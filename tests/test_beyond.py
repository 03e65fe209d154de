"""Policies beyond the paper: the feasible set and joint deadlines, by hand, against brute force, and as laws."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import checked, toy_latency, workload

from flowsim import ComposedPolicy, LatencyModel, PrefillOnly, Request, load_profile, simulate
from flowsim.check import check_result
from flowsim.config import compose, make
from flowsim.feasible import FeasibleSet, JointDeadline, feasible_set
from flowsim.feasible_routing import FeasibleRouting
from flowsim.predictor import Noisy
from flowsim.rivals import Graceful, TimeBudget
from flowsim.router import LeastWork, RoundRobin
from flowsim.testing import check_policy, make_job, make_view
from flowsim.workload import mixed

SECOND = toy_latency(1.0)
A100 = LatencyModel(load_profile("llama3-8b", "a100"))
JOBS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 60)), min_size=1, max_size=7)
FEW = settings(deadline=None, max_examples=80)


def ran(result):
    """(requests of the batch, start_s, end_s) of each segment."""
    members = result.batches.groupby("batch").request.agg(list).to_dict()
    return [(members[row.batch], round(row.start_s, 6), round(row.end_s, 6)) for row in result.segments.itertuples()]


def shipped(name, *overrides):
    return make(compose([f"policy={name}", *(f"policy.{override}" for override in overrides)]), "policy")


def waiting_view(jobs, **options):
    jobs = [make_job(number, tokens, ttft_slo_s=slo_s) for number, (tokens, slo_s) in enumerate(jobs)]
    return make_view(waiting=jobs, latency=SECOND, **options)


def all_on_time(jobs):
    end_s = itertools.accumulate(tokens for tokens, _ in sorted(jobs, key=lambda job: job[1]))
    return all(end <= slo_s for end, (_, slo_s) in zip(end_s, sorted(jobs, key=lambda job: job[1]), strict=True))


# ---------------------------------------------------------------- the feasible set


@FEW
@given(JOBS)
def test_no_set_of_jobs_that_can_all_be_on_time_is_larger(jobs):
    # deadlines between whole seconds, so that rounding decides no tie; what is hopeless alone is left out
    jobs = [(tokens, slo + 0.5) for tokens, slo in jobs if slo >= tokens]
    chosen = feasible_set(waiting_view(jobs))
    sizes = [len(some) for n in range(len(jobs) + 1) for some in itertools.combinations(jobs, n) if all_on_time(some)]
    assert len(chosen) == max(sizes)
    assert all_on_time([(one.left_s, one.due_s) for one in chosen])
    assert [one.due_s for one in chosen] == sorted(one.due_s for one in chosen)


def test_the_longest_is_given_up_where_not_all_can_be_on_time():
    # 40 s due 50, 16 s due 54, 20 s due 55: all three need 76 s. Without the 40 s the other two need 36.
    requests = workload((0.0, 40, 50.0), (0.0, 16, 54.0), (0.0, 20, 55.0))
    assert ran(checked(requests, shipped("feasible_set", "batching.tokens=1"), SECOND)) == [
        ([1], 0.0, 16.0),
        ([2], 16.0, 36.0),
        ([0], 36.0, 76.0),
    ]
    # FlowPrefill starts with the earliest deadline, and saves one
    assert checked(requests, shipped("no_batching"), SECOND).requests.met_slo.sum() == 1


def test_what_has_started_goes_on_while_those_before_it_can_wait_and_they_run_as_one_batch():
    # At 20 and 21 two of 5 s come, due at 120: before the first (due 200), but the first ends at 100.
    requests = workload((0.0, 100, 200.0), (20.0, 5, 100.0), (21.0, 5, 99.0))
    assert ran(checked(requests, shipped("feasible_set"), SECOND)) == [([0], 0.0, 100.0), ([1, 2], 100.0, 110.0)]


def test_what_has_started_is_paused_for_what_cannot_wait_for_its_end():
    # As before, but due at 104: one of them could wait, both cannot. Layers end every 50 s.
    requests = workload((0.0, 100, 200.0), (20.0, 5, 84.0), (21.0, 5, 83.0))
    assert ran(checked(requests, shipped("feasible_set"), SECOND)) == [
        ([0], 0.0, 50.0),
        ([1, 2], 50.0, 60.0),
        ([0], 60.0, 110.0),
    ]


def test_a_batch_that_has_run_past_its_prediction_is_not_trusted_to_end_soon():
    # All is predicted at half its time: at 61 request 0 (100 s) should have ended at 50. Request 1 is due at 90.
    requests = workload((0.0, 100, 300.0), (61.0, 5, 29.0))
    half = functools.partial(Noisy, sigma=0.0, bias=-0.5)
    policy = shipped("feasible_set", "stops=operator")
    result = simulate(requests, policy=policy, latency=SECOND, predictor=half)
    assert ran(result) == [([0], 0.0, 70.0), ([1], 70.0, 75.0), ([0], 75.0, 105.0)]


def test_of_what_is_late_anyhow_the_one_that_started_ends_first():
    # Request 0 is hopeless from the start; 1 is served in between; 2 is hopeless too, due later.
    requests = workload((0.0, 100, 10.0), (20.0, 5, 100.0), (21.0, 60, 40.0))
    result = checked(requests, shipped("feasible_set"), SECOND)
    assert ran(result) == [([0], 0.0, 50.0), ([1], 50.0, 55.0), ([0], 55.0, 105.0), ([2], 105.0, 165.0)]


def test_a_suspended_batch_counts_for_all_its_members_that_can_still_be_on_time():
    # Two of 10 s paused half-way, due 20 and 40: 10 s left save both by 20. A job of 12 s due 21 saves one.
    members = [make_job(0, 10, ttft_slo_s=20.0), make_job(1, 10, ttft_slo_s=40.0)]
    job = make_job(2, 12, ttft_slo_s=21.0)
    view = make_view(waiting=[job], suspended=[(members, 0.45)], latency=SECOND)
    (chosen,) = feasible_set(view)
    assert (chosen.saves, chosen.due_s, chosen.work.head.id) == (2, 20.0, 0)
    view.now_s = 12.0  # the first is lost, the second is not
    assert [(one.saves, one.due_s) for one in feasible_set(view)] == [(1, 40.0)]


def test_a_head_that_does_not_fit_leaves_the_gpu_to_the_next_of_the_set_that_does():
    requests = workload((0.0, 80, 1000.0), (5.0, 30, 50.0), (6.0, 10, 60.0))
    result = checked(requests, shipped("feasible_set", "stops=operator"), SECOND, kv_blocks=100, block_tokens=1)
    assert ran(result)[:2] == [([0], 0.0, 8.0), ([2], 8.0, 18.0)]


def test_hopeless_jobs_are_not_walked():
    jobs = [(10, 5.0)] * 3000 + [(10, 100.0), (20, 100.0), (30, 100.0)]
    view = waiting_view(jobs)
    assert len(feasible_set(view)) == 3  # also files the jobs
    asked = []

    class Spy(type(view)):
        __slots__ = ()

        def left_s(self, work):
            asked.append(work)
            return super().left_s(work)

    view.__class__ = Spy
    assert len(feasible_set(view)) == 3
    assert len(asked) <= 10


@pytest.mark.parametrize("stops", ["request", "pass", "layer", "operator"])
def test_the_feasible_set_conforms_to_the_contract(stops):
    check_policy(FeasibleSet(stops=stops), situations=100, runs=2)


def test_more_requests_are_on_time_than_with_flowprefill_near_saturation():
    gained = []
    for seed in range(3):
        requests = mixed(rate_rps=13.5, num_requests=800, seed=seed)
        met = [
            simulate(requests, policy=shipped(name), latency=A100).summary()["attainment"]
            for name in ("feasible_set", "flowprefill")
        ]
        gained.append(met[0] - met[1])
    assert min(gained) > 0.0


@pytest.mark.parametrize("sigma", [0.3, 1.5])
def test_predictions_however_wrong_do_no_more_than_cost_attainment(sigma):
    requests = mixed(rate_rps=13.0, num_requests=300, seed=5)
    predictor = functools.partial(Noisy, sigma=sigma, bias=-0.5, seed=1)
    for router in (RoundRobin(), FeasibleRouting()):
        cluster = PrefillOnly(instances=2)
        policy = shipped("feasible_set")
        result = simulate(requests, policy=policy, latency=A100, predictor=predictor, cluster=cluster, router=router)
        check_result(result, A100)


# ---------------------------------------------------------------- joint deadlines


@FEW
@given(JOBS, st.integers(10, 80))
def test_every_member_of_a_joint_batch_and_everybody_passed_over_stays_on_time(jobs, tokens):
    view = waiting_view([(tokens, float(slo)) for tokens, slo in jobs if slo > tokens] or [(1, 2.0)])
    queue = feasible_set(view)
    batch = JointDeadline(tokens=tokens).join(queue, view)
    members = [job for job, _ in batch.parts]
    end_s = view.cost_s(batch.parts)
    assert all(end_s <= job.deadline_s for job in members)
    assert len(members) == 1 or batch.tokens <= tokens
    for one in queue:
        if one.work not in members:
            end_s += one.left_s
            assert end_s <= one.due_s + 1e-9


def test_a_member_with_a_deadline_before_the_end_of_the_batch_does_not_join():
    # The head is due at 100; the second, due at 12, cannot wait for 10 + 5 s, and is passed over; the third joins,
    # unless that makes the one passed over late.
    requests = workload((0.0, 10, 100.0), (0.0, 5, 101.0), (0.0, 3, 102.0))
    policy = ComposedPolicy("arrival", JointDeadline(), "operator")
    assert ran(checked(requests, policy, SECOND)) == [([0, 1, 2], 0.0, 18.0)]
    tight = workload((0.0, 10, 100.0), (0.0, 5, 12.0), (0.0, 3, 102.0))
    assert ran(checked(tight, policy, SECOND))[0] == ([0], 0.0, 10.0)


def test_a_margin_is_kept_before_the_earliest_deadline():
    requests = workload((0.0, 10, 20.0), (0.0, 5, 30.0))
    for margin_s, first in ((5.0, [0, 1]), (5.5, [0])):
        policy = ComposedPolicy("deadline", JointDeadline(margin_s=margin_s), "operator")
        assert ran(checked(requests, policy, SECOND))[0][0] == first


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="tokens"):
        JointDeadline(tokens=0)
    with pytest.raises(ValueError, match="layer"):
        FeasibleSet(stops="layre")
    with pytest.raises(ValueError, match="slack_edf"):
        FeasibleSet(rest="slackedf")
    assert math.isinf(make_job(0, 1).deadline_s)


# ---------------------------------------------------------------- classes with weights


def test_a_class_with_more_weight_is_given_up_later():
    # 40 s and 20 s, both due at 50: the longer is given up, unless it weighs more than twice as much.
    jobs = [make_job(0, 40, ttft_slo_s=50.0, slo_class="file"), make_job(1, 20, ttft_slo_s=50.0, slo_class="text")]
    view = make_view(waiting=jobs, latency=SECOND)
    for weight, kept in ((1.0, 1), (1.9, 1), (2.1, 0)):
        assert [one.work.id for one in feasible_set(view, {"file": weight})] == [kept]
    assert FeasibleSet(weights={"file": 2.1}).select(view).head.id == 0
    with pytest.raises(ValueError, match=r"weights\.file"):
        FeasibleSet(weights={"file": 0.0})


# ---------------------------------------------------------------- rivals


@pytest.mark.parametrize(
    "name", ["slack_fraction", "least_remaining_slack", "graceful", "chunked_adaptive", "feasible_set"]
)
def test_every_policy_of_this_chapter_conforms_to_the_contract(name):
    check_policy(shipped(name), situations=100, runs=2)


def test_slack_fraction_counts_slack_in_shares_of_the_slo():
    # At 0: 10 s of 20 left is half, 30 s of 40 three quarters, 0 of 10 is lost and goes last.
    requests = workload((0.0, 10, 40.0), (0.0, 10, 20.0), (0.0, 10, 10.0))
    result = checked(requests, shipped("slack_fraction", "batching.tokens=1", "stops=request"), SECOND)
    assert [members for members, *_ in ran(result)] == [[1], [0], [2]]


def test_graceful_gives_what_is_late_a_second_deadline_that_counts():
    # Request 0 (10 s) is late from the start; its second deadline is at 3 x 5 = 15. At 0 request 1, due at 12, is
    # before it; at 5 request 2, due at 105, is after it, though FlowPrefill would serve it first.
    requests = workload((0.0, 10, 5.0), (0.0, 5, 12.0), (4.0, 10, 101.0))
    policy = shipped("graceful", "batching.tokens=1", "stops=request")
    assert [members for members, *_ in ran(checked(requests, policy, SECOND))] == [[1], [0], [2]]
    policy = shipped("graceful", "batching.tokens=1", "stops=request", "order.times=30")
    assert [members for members, *_ in ran(checked(requests, policy, SECOND))] == [[1], [2], [0]]
    with pytest.raises(ValueError, match="times"):
        Graceful(0.5)


def test_a_time_budget_cuts_passes_where_their_time_is_up_so_that_later_chunks_are_smaller():
    # A token takes a second, and each token 0.1 s for each earlier one (half of that for those of its own chunk).
    latency = toy_latency(1.0, quadratic_s=0.025)
    result = checked(workload((0.0, 30)), ComposedPolicy("arrival", TimeBudget(busy_s=15.0), "pass"), latency)
    took_s = (result.segments.end_s - result.segments.start_s).tolist()
    assert max(took_s) <= 15.0
    assert result.batches.tokens.tolist() == sorted(result.batches.tokens, reverse=True)
    assert len(took_s) > 2


def test_a_time_budget_fills_a_pass_with_whole_prompts_and_cuts_the_last():
    policy = ComposedPolicy("arrival", TimeBudget(busy_s=10.0), "pass")
    result = checked(workload((0.0, 4), (0.0, 3), (0.0, 8), (0.0, 2)), policy, SECOND)
    members = result.batches.groupby("batch")[["request", "tokens"]].apply(lambda rows: rows.to_numpy().tolist())
    assert members.tolist() == [[[0, 4], [1, 3], [2, 3]], [[2, 5], [3, 2]]]
    with pytest.raises(ValueError, match="busy_s"):
        TimeBudget(busy_s=0.0)


def test_a_cautious_predictor_answers_a_quantile_of_what_the_truth_may_be():
    plain, cautious = Noisy(A100, sigma=0.2, seed=1), Noisy(A100, sigma=0.2, quantile=0.9, seed=1)
    lengths = range(100, 2100, 2)
    assert cautious.alone_s(500) == pytest.approx(plain.alone_s(500) * math.exp(0.2 * 1.2815516))
    late = sum(A100.isolated_s(tokens) > cautious.alone_s(tokens) for tokens in lengths) / len(lengths)
    assert late == pytest.approx(0.1, abs=0.03)
    with pytest.raises(ValueError, match="quantile"):
        Noisy(A100, quantile=1.0)


# ---------------------------------------------------------------- routing by feasible sets


def test_feasible_routing_sends_a_request_where_nobody_else_becomes_late():
    # Instance 0 has 30 s due at 31, instance 1 has 40 s due at 100. A request of 5 s due at 20 breaks the first.
    requests = workload((0.0, 30, 31.0), (0.0, 40, 100.0), (1.0, 5, 19.0))
    policy = shipped("feasible_set", "stops=operator")
    chosen = {}
    for name, router in (("least", LeastWork()), ("feasible", FeasibleRouting())):
        result = simulate(requests, policy=policy, latency=SECOND, cluster=PrefillOnly(instances=2), router=router)
        check_result(result, SECOND)
        chosen[name] = (result.requests.prefill_instance.tolist(), int(result.requests.met_slo.sum()))
    assert chosen == {"least": ([0, 1, 0], 2), "feasible": ([0, 1, 1], 3)}


def test_feasible_routing_without_slos_is_least_work():
    requests = [Request(id=n, arrival_s=0.1 * n, prompt_tokens=10 + 7 * (n % 5)) for n in range(40)]
    routed = [
        simulate(requests, policy=shipped("fcfs"), latency=SECOND, cluster=PrefillOnly(instances=3), router=router)
        for router in (LeastWork(), FeasibleRouting())
    ]
    assert routed[0].tables["requests"]["prefill_instance"].tolist() == (
        routed[1].tables["requests"]["prefill_instance"].tolist()
    )


def test_feasible_routing_beats_round_robin_near_saturation():
    met = {}
    requests = mixed(rate_rps=52.0, num_requests=1200, seed=1)
    for name, router in (("round robin", RoundRobin()), ("feasible", FeasibleRouting())):
        cluster = PrefillOnly(instances=4)
        result = simulate(requests, policy=shipped("feasible_set"), latency=A100, cluster=cluster, router=router)
        check_result(result, A100)
        met[name] = result.summary()["attainment"]
    assert met["feasible"] > met["round robin"]
