"""Stops that a batch has of its own, and the policy that chooses them: by hand, against brute force, and as laws."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import checked, toy_latency, workload

from flowsim import Alone, ComposedPolicy, LatencyModel, SLOAware, Stops, load_profile, simulate
from flowsim.check import check_result
from flowsim.config import build, compose, make
from flowsim.core import Batch, Part, PolicyError
from flowsim.feasible import FeasibleSet
from flowsim.granularity import AdaptiveStops, expected_flags
from flowsim.latency import Exact
from flowsim.metrics import Result
from flowsim.policy import hopeless
from flowsim.pool import Link, Pool
from flowsim.predictor import Noisy, Poly3
from flowsim.testing import check_policy, make_job, make_view
from flowsim.timeline import Pass, Timeline
from flowsim.workload import mixed

A100 = LatencyModel(load_profile("llama3-8b", "a100"))
PLAIN = toy_latency(1.0)  # a token takes a second, in two layers of five equal operators
DEAR = toy_latency(1.0, check_s=1.0)
FEW = settings(deadline=None, max_examples=60)
CUTTING = (Stops.LAYER, Stops.BLOCK, Stops.OPERATOR)


class Own:
    """EDF one by one, each request with the stops that are named for its id."""

    stops = Stops.PASS

    def __init__(self, *names: str) -> None:
        self.names = names
        self.within = ComposedPolicy("deadline", Alone(), "pass")

    def select(self, view):
        batch = self.within.select(view)
        if batch is not None and batch.number < 0:
            batch.stops = Stops(self.names[batch.id % len(self.names)])
        return batch


def sedf(stops: str, **options) -> ComposedPolicy:
    return ComposedPolicy("slack_edf", SLOAware(), stops, **options)


def shipped(*overrides: str) -> AdaptiveStops:
    return make(compose(["policy=adaptive_stops", *(f"policy.{override}" for override in overrides)]), "policy")


def chosen(policy, **view) -> Stops | None:
    answer = policy.select(make_view(**view))
    assert answer is not None
    return answer.stops


# ---------------------------------------------------------------- stops of a batch's own


def test_a_batch_stops_where_it_may_itself_and_pays_for_its_own_checks():
    # 20 s of work in 10 operators, with a check each 3 s apart; the one that comes at 4 s waits for the one at 6 s.
    # Request 2 has layer stops, 11 s apart: that which comes 2 s after its start waits for 9 s.
    requests = workload((0.0, 20, 200.0), (4.0, 10, 30.0), (100.0, 20, 200.0), (102.0, 10, 30.0))
    result = checked(requests, Own("operator", "request", "layer", "pass"), DEAR)
    spans = [(row.batch, row.start_s, row.end_s, row.last_op) for row in result.segments.itertuples()]
    assert spans == [
        (0, 0.0, 6.0, 2),
        (1, 6.0, 16.0, 10),
        (0, 16.0, 40.0, 10),
        (2, 100.0, 111.0, 5),
        (3, 111.0, 121.0, 10),
        (2, 121.0, 132.0, 10),
    ]
    assert result.tables["stops"]["stops"].tolist() == ["operator", "request", "layer", "pass"]


def test_ranks_of_a_group_stop_one_of_the_batchs_own_stops_later():
    profile = dataclasses.replace(load_profile("llama3-8b", "a100"), switch_s=0.0)
    latency = LatencyModel(profile, tp=2)
    requests = workload((0.0, 8000, 60.0), (0.05, 100, 1.0))
    for stops in CUTTING:
        result = simulate(requests, policy=Own(stops.value), latency=latency)
        check_result(result, latency)
        timeline = latency.stopping(stops).timeline([(8000, 0)])
        seen = timeline.next_stop(0.05, stops)
        assert result.segments.last_op[0] == timeline.next_stop(seen.at_s + 1e-6, stops).operators


@pytest.mark.parametrize("predictor", [Exact, Poly3, lambda latency: Noisy(latency, sigma=0.3)])
def test_what_is_predicted_for_a_batch_counts_its_own_checks(predictor):
    predicted_s = {}

    class Watching(Own):
        def select(self, view):
            if view.running is not None:
                predicted_s[self.names[0]] = view.left_s(view.running) + view.now_s
            return super().select(view)

    for stops in Stops:  # request 1 comes while request 0 runs, and is due after it
        result = simulate(
            workload((0.0, 3000, 9.0), (0.1, 100, 90.0)), policy=Watching(stops.value), latency=A100,
            predictor=predictor,
        )  # fmt: skip
        if predictor is Exact:
            assert predicted_s[stops.value] == pytest.approx(result.requests.ttft_s[0], abs=1e-9)
    spent_s = {stops: 32 * len(stops.operators) * A100.profile.check_s for stops in Stops}
    without_s = {round(predicted_s[stops.value] - spent_s[stops], 9) for stops in Stops}
    assert len(without_s) == 1


def test_batches_without_stops_of_their_own_have_their_policys_and_the_run_no_table_of_them():
    requests = workload((0.0, 20, 200.0), (4.0, 10, 30.0))
    result = checked(requests, ComposedPolicy("deadline", Alone(), "operator"), DEAR)
    assert "stops" not in result.tables
    assert result.segments.end_s[0] == 6.0


def test_the_table_of_stops_is_saved_and_read_again(tmp_path):
    result = checked(workload((0.0, 20), (1.0, 5), (2.0, 5)), Own("layer", "block", "operator"), DEAR)
    again = Result.load(result.save(tmp_path))
    assert {name: cells.tolist() for name, cells in again.tables["stops"].items()} == {
        "batch": [0, 1, 2], "instance": [0, 0, 0], "stops": ["layer", "block", "operator"],
    }  # fmt: skip
    check_result(again, DEAR)


@pytest.mark.parametrize("said", ["layer", "block", "request"])
def test_a_pause_elsewhere_than_at_the_batchs_own_stops_breaks_a_law(said):
    result = checked(workload((0.0, 20, 200.0), (3.0, 10, 30.0)), Own("operator", "pass"), PLAIN)
    assert result.segments.last_op[0] == 2
    result.tables["stops"]["stops"][0] = said
    with pytest.raises(AssertionError, match="9 pauses are at legal stops"):
        check_result(result, PLAIN)


def test_a_batch_that_decodes_has_no_stops_of_its_own():
    class Wrong:
        stops = Stops.PASS

        def select(self, view):
            if view.running is not None and view.running.parts:
                return view.running
            parts = [Part(job, job.left_tokens) for job in view.waiting]
            if parts:
                return Batch(parts, view.decoding, stops=Stops.LAYER)
            return Batch((), view.decoding) if view.decoding else None

    requests = [dataclasses.replace(one, output_tokens=50) for one in workload((0.0, 400), (0.1, 400))]
    with pytest.raises(PolicyError, match=re.escape("gave stops to a batch that decodes")):
        simulate(requests, policy=Wrong(), latency=A100, cluster=Pool(decode="here"))


class Answers:
    """One prompt at a time, in batches that a function makes of it."""

    stops = Stops.PASS

    def __init__(self, make) -> None:
        self.make = make

    def select(self, view):
        job = next(iter(view.waiting), None)
        return view.running or (job and self.make(Part(job, job.left_tokens)))


OF_PARTS = "a batch is made of parts, Part(job, tokens), and of jobs that decode; got Batch("


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda part: Batch([part], stops="layer"), "gave a batch the stops 'layer'. Allowed: a member of"),
        (lambda part: Batch([part], layers=5), "chose layers 5. Allowed: a range of them"),
        (lambda part: Batch([part], layers=(0, 2)), "chose layers (0, 2). Allowed: a range of them"),
        (lambda part: Batch([part], Stops.LAYER), f"{OF_PARTS}(Part(job=Job(0"),
        (lambda part: Batch(part.job), f"{OF_PARTS}Job(0"),
        (lambda part: Batch([Part(None, part.tokens)]), f"{OF_PARTS}(Part(job=None"),
    ],
)
def test_a_batch_made_of_wrong_things_is_refused_with_what_a_batch_is_made_of(make, said):
    with pytest.raises(PolicyError, match=re.escape(said)):
        checked(workload((0.0, 20)), Answers(make), PLAIN)


LINK = Link(latency_s=4e-5, bytes_per_s=16e9)


@pytest.mark.parametrize("options", [{"async_steps": 1}, {"expert_parallel": True, "collective": LINK}])
def test_where_batches_run_to_their_ends_none_pays_for_stops_within(options):
    moe = LatencyModel(load_profile("qwen3-30b-a3b", "rtxpro6000"))
    requests = [dataclasses.replace(one, output_tokens=9) for one in workload((0.0, 6000), (0.1, 400), (0.2, 9000))]
    cluster = Pool(decode="here", instances=2, **options)
    result = simulate(requests, policy=AdaptiveStops(sedf("pass")), latency=moe, cluster=cluster)
    check_result(result, cluster.hardware(moe))
    assert set(result.tables["stops"]["stops"].tolist()) == {"pass"}
    made = Answers(lambda part: Batch([part], stops=Stops.LAYER))
    with pytest.raises(
        PolicyError, match=r"gave a batch stops at layer. Allowed: none within a pass where batches run"
    ):
        simulate(requests, policy=made, latency=moe, cluster=cluster)


# ---------------------------------------------------------------- what stops cost and give


passes = st.builds(
    lambda ends, head, tail, layers: Pass(1, head, tuple(np.cumsum(ends).tolist()), layers, tail),
    st.lists(st.floats(0.1, 5.0), min_size=5, max_size=5),
    st.floats(0.0, 3.0),
    st.floats(0.0, 3.0),
    st.integers(3, 6),
)


@FEW
@given(passes, st.sampled_from(CUTTING), st.integers(0, 1))
def test_the_mean_wait_is_that_of_flags_at_all_moments_of_a_layer(one, stops, passed):
    timeline = Timeline([one])
    layer_s = one.ends_s[4]
    waits_s = []
    moments = 4000
    for moment in range(moments):  # of the first layer, as the stop after the next is then within the second
        at_s = one.head_s + layer_s * (moment + 0.5) / moments
        stop = timeline.next_stop(at_s, stops)
        for _ in range(passed):
            stop = timeline.next_stop(stop.at_s + 1e-6, stops)
        waits_s.append(stop.at_s - at_s)
    assert timeline.mean_wait_s(stops, passed) == pytest.approx(np.mean(waits_s), rel=2e-3)


def test_what_stops_only_at_the_end_of_a_pass_waits_for_half_of_it_on_average():
    short, long = Pass(1, 0.0, (1.0, 2.0, 3.0, 4.0, 5.0), 2, 0.0), Pass(1, 0.0, (6.0, 12.0, 18.0, 24.0, 30.0), 1, 0.0)
    timeline = Timeline([short, long])
    assert timeline.mean_wait_s(Stops.PASS) == pytest.approx((10 * 5 + 30 * 15) / 40)
    assert timeline.mean_wait_s(Stops.REQUEST) == pytest.approx(20.0)


@FEW
@given(st.integers(1, 20_000), st.sampled_from([1, 2]))
def test_denser_stops_never_cost_less_or_keep_anybody_waiting_longer(tokens, tp):
    latency = LatencyModel(load_profile("llama3-8b", "a100"), tp)
    view = make_view(waiting=[make_job(0, tokens)], latency=latency)
    parts = [Part(job, job.left_tokens) for job in view.waiting]
    for sparse, dense in itertools.pairwise(CUTTING):
        cost, gain = view.pauses(parts, dense), view.pauses(parts, sparse)
        assert cost.checks_s > gain.checks_s
        assert cost.wait_s < gain.wait_s
    assert view.pauses(parts, Stops.PASS).checks_s == 0.0


# ---------------------------------------------------------------- how many are expected


def test_expected_flags_are_the_latest_arrivals_that_would_be_due_first_and_one_more():
    # A token takes a second. The batch has 10 s of work and is due in 40 s. In the 20 s since request 0 came, five did:
    # with SLOs of 4 s (due first if they come in any of the 10 s), 33 s (in the first 7 s), 45 s (never), and itself.
    jobs = [
        make_job(0, 500, arrival_s=80.0, ttft_slo_s=4.0),
        make_job(1, 500, arrival_s=85.0, ttft_slo_s=33.0),
        make_job(2, 500, arrival_s=90.0, ttft_slo_s=45.0),
        make_job(3, 500, arrival_s=95.0),
        make_job(4, 10, arrival_s=100.0, ttft_slo_s=40.0),
    ]
    view = make_view(now_s=100.0, waiting=jobs, latency=PLAIN)
    batch = Batch([Part(jobs[-1], 10)])
    assert expected_flags(batch, view) == pytest.approx((10 + 7 + 10) / 20)
    late = make_job(5, 41, arrival_s=100.0, ttft_slo_s=40.0)  # gives way to whatever comes
    view.arrived.append(late)
    assert expected_flags(Batch([Part(late, 41)]), view) == pytest.approx((6 + 1) * 41 / 41)


def test_before_anything_else_has_come_a_batch_is_expected_to_give_way_once():
    job = make_job(0, 10, ttft_slo_s=40.0)
    view = make_view(waiting=[job], latency=PLAIN)
    batch = Batch([Part(job, 10)])
    assert expected_flags(batch, view) == 1.0
    view.arrived.clear()  # it came by way of another instance
    assert expected_flags(batch, view) == 1.0


def test_a_view_remembers_the_latest_arrivals_and_none_that_were_refused():
    seen = []

    class Looking(Own):
        def admit(self, _view, job):
            return job.id % 2 == 0

        def select(self, view):
            seen.append([job.id for job in view.arrived])
            return super().select(view)

    checked(workload(*[(float(place), 1) for place in range(200)]), Looking("layer"), toy_latency(0.1))
    assert seen[0] == [0]
    assert seen[-1] == list(range(72, 200, 2))  # 64 of them


# ---------------------------------------------------------------- the rule


def test_free_checks_are_made_at_every_operator_and_dear_ones_nowhere():
    jobs = [make_job(0, 4000, ttft_slo_s=6.0), make_job(1, 64, ttft_slo_s=9.0)]
    for check_s, stops in ((0.0, "operator"), (10.0, "layer")):
        latency = LatencyModel(dataclasses.replace(A100.profile, check_s=check_s))
        for waiting in (jobs, jobs[:1], jobs[1:]):
            assert chosen(AdaptiveStops(sedf("layer")), waiting=waiting, latency=latency) == Stops(stops)
    assert chosen(shipped(), waiting=jobs, latency=latency) is Stops.PASS


@pytest.mark.parametrize(("check_s", "stops"), [(0.0, "operator"), (0.05, "layer")])
def test_with_free_and_with_very_dear_checks_a_run_is_that_of_the_densest_and_of_the_sparsest_stops(check_s, stops):
    latency = LatencyModel(dataclasses.replace(A100.profile, check_s=check_s))
    requests = mixed(rate_rps=5.0, num_requests=150, seed=2)
    own = checked(requests, AdaptiveStops(sedf("layer")), latency)
    plain = checked(requests, sedf(stops), latency)
    assert own.segments.equals(plain.segments)
    assert own.preemptions.equals(plain.preemptions)
    if stops == "layer":  # predictions, and what an idle instance would take, are those of the policy's own stops
        assert own.requests.equals(plain.requests)


def test_what_nothing_will_be_due_before_has_no_checks_and_what_gives_way_often_has_many():
    urgent = [make_job(place, 200, arrival_s=0.1 * place, ttft_slo_s=0.25) for place in range(40)]
    view = {"now_s": 4.0, "latency": A100}
    text = make_job(40, 200, arrival_s=4.0, ttft_slo_s=0.25)
    file = make_job(41, 12_000, arrival_s=4.0, ttft_slo_s=8.0)
    for job, stops in ((text, Stops.PASS), (file, Stops.OPERATOR)):
        now = make_view(waiting=[job], **view)
        now.arrived.extendleft(reversed(urgent))
        answer = shipped().select(now)
        assert answer.stops is stops


@FEW
@given(st.integers(100, 16_000), st.integers(0, 40), st.integers(0, 40), st.floats(0.5, 10.0))
def test_more_who_wait_never_make_stops_denser_and_more_who_come_never_sparser(tokens, waiting, coming, slo_s):
    dense = list(Stops)

    def stops_of(behind: int, urgent: int) -> int:
        job = make_job(0, tokens, arrival_s=10.0, ttft_slo_s=slo_s)
        idle = [make_job(100 + place, 300, arrival_s=10.0, ttft_slo_s=99.0) for place in range(behind)]
        now = make_view(now_s=10.0, waiting=[job, *idle], latency=A100)
        now.arrived.clear()  # the same history whoever waits
        now.arrived.append(make_job(98, 1, arrival_s=0.0))
        now.arrived.extend(make_job(200 + place, 1, arrival_s=9.0, ttft_slo_s=0.1) for place in range(urgent))
        within = ComposedPolicy("deadline", Alone(), "pass")
        answer = AdaptiveStops(within).select(now)
        assert answer.head is job
        return dense.index(answer.stops)

    assert stops_of(waiting, coming) >= stops_of(waiting + 7, coming)
    assert stops_of(waiting, coming) <= stops_of(waiting, coming + 7)


def test_with_adaptive_stops_the_mean_ttft_is_below_that_of_any_one_kind():
    # A long prompt every 4 s, and short ones that come while it runs and are due before it: they want operator stops.
    # Then 25 short ones at once, which nothing is ever due before: with each check of theirs the others wait.
    rows = []
    for start_s in (0.0, 4.0, 8.0, 12.0, 16.0):
        rows += [(start_s, 8000, 30.0), *((start_s + 0.05 + 0.11 * place, 100, 0.3) for place in range(8))]
        rows += [(start_s + 2.5, 150, 2.0)] * 25
    mean_s = {
        name: checked(workload(*rows), policy, A100).requests.ttft_s.mean()
        for name, policy in {
            "adaptive": AdaptiveStops(ComposedPolicy("slack_edf", Alone(), "pass")),
            **{stops.value: ComposedPolicy("slack_edf", Alone(), stops) for stops in Stops},
        }.items()
    }
    assert min(mean_s, key=mean_s.__getitem__) == "adaptive"


# ---------------------------------------------------------------- around any policy


@pytest.mark.parametrize(
    "within",
    [sedf("pass"), sedf("layer", max_suspend_s=1.0), FeasibleSet(stops="pass"), sedf("layer", consult="stops")],
    ids=repr,
)
def test_adaptive_stops_around_any_policy_conform_to_the_contract(within):
    check_policy(AdaptiveStops(within), situations=100, runs=2)


def test_what_the_policy_within_says_of_itself_holds_around_it():
    within = sedf("layer", consult="stops", admit="hopeless")
    policy = AdaptiveStops(within, densest="block")
    assert (policy.stops, policy.consult, policy.admit) == (Stops.LAYER, "stops", hopeless)
    assert policy.choices == [Stops.LAYER, Stops.BLOCK]


def test_batches_that_decode_keep_the_stops_of_their_policy():
    requests = [dataclasses.replace(one, output_tokens=50) for one in workload((0.0, 400), (0.1, 400), (0.2, 9000))]
    result = simulate(requests, policy=AdaptiveStops(sedf("pass")), latency=A100, cluster=Pool(decode="here"))
    check_result(result, A100)
    decoding = set(result.tables["steps"]["batch"][result.tables["steps"]["decodes"] > 0].tolist())
    assert decoding
    assert not decoding & set(result.tables["stops"]["batch"].tolist())


def test_a_range_of_stops_that_is_none_is_refused_and_a_typo_is_answered_with_what_was_meant():
    with pytest.raises(ValueError, match="is pass, sparser than the policy's own stops, layer"):
        AdaptiveStops(sedf("layer"), densest="pass")
    with pytest.raises(ValueError, match="'operator'"):
        shipped("densest=opertor")
    with pytest.raises(ValueError, match="within"):
        shipped("stops=layer")


@pytest.mark.parametrize(
    ("within", "said"),
    [
        (None, "None is no policy: it needs `stops`"),
        ("flowprefill", "'flowprefill' is no policy: it needs `stops`, .*compose"),
        (Own, r"is no policy: .*; give an object of the class: Own\(...\)"),
    ],
)
def test_what_is_no_policy_is_refused_with_what_one_needs(within, said):
    with pytest.raises(ValueError, match=said):
        AdaptiveStops(within)
    with pytest.raises(ValueError, match=said):
        simulate([], policy=within, latency=PLAIN)


def test_on_the_shipped_workload_all_kinds_of_stops_are_chosen():
    result = build(compose(["policy=adaptive_stops", "workload.rate_rps=12", "workload.num_requests=400"])).run()
    check_result(result, A100)
    stops = dict(zip(*np.unique(result.tables["stops"]["stops"].astype(str), return_counts=True), strict=True))
    assert stops.keys() == {"pass", "layer", "block", "operator"}
    assert sum(stops.values()) == len(set(result.tables["batches"]["batch"].tolist()))
