"""Layered prefill: prompts that go through the model a group of layers a step, beside decodes that go through all."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import toy_latency

from flowsim import ComposedPolicy, LatencyModel, Request, Result, TokenBudget, load_profile, simulate
from flowsim.check import check_result
from flowsim.config import compose, make
from flowsim.core import Batch, Part, PolicyError
from flowsim.explain import explain, misses_by_cause
from flowsim.latency import NO_DECODES, Decodes
from flowsim.layered import LayerGroups
from flowsim.pool import Cluster, Failure, Link, Pool
from flowsim.profile import Dense, Terms
from flowsim.report.series import waiting
from flowsim.testing import make_job, make_view
from flowsim.tokens import token_times_s

MOE = LatencyModel(load_profile("qwen3-30b-a3b", "h100"))
DENSE = LatencyModel(load_profile("llama3-8b", "rtxpro6000"))  # with mixed attention of its own
EVER = (1, 10**9)
LINK = Link(latency_s=1e-5, bytes_per_s=1e11)


def layered(order: str = "arrival", **batching: int) -> ComposedPolicy:
    return ComposedPolicy(order, LayerGroups(**batching), "pass")


def served(requests, latency=DENSE, *, policy, **pool) -> Result:
    """A run on one engine, with its laws checked."""
    cluster = Pool(**{"decode": "here", **pool})
    result = simulate(requests, policy=policy, latency=latency, cluster=cluster)
    check_result(result, Cluster.of(cluster).hardware(latency))
    return result


def in_groups(layers: int, groups: int) -> list[range]:
    """As numpy splits them, and the paper's code with it."""
    return [range(part[0], part[-1] + 1) for part in np.array_split(np.arange(layers), groups)]


def by_hand() -> LatencyModel:
    """Three layers; an operator, embedding and head take 1 ms a token, and 0.1 ms for each token that decodes see."""
    profile = toy_latency(0.015, layers=3, tail=True).profile
    embedding = Dense("embedding", "head", 0.0, (), (0.001,), EVER)
    decode = Terms("decode", {"1": 0.0, "n": 0.001, "sum_kv": 0.0001, "mean_kv": 0.0}, EVER)
    dense = {1: (*profile.dense[1], embedding)}
    return LatencyModel(replace(profile, dense=dense, decode_attention={1: decode}))


def test_a_step_is_a_group_of_the_prompts_layers_beside_all_layers_of_the_decodes():
    # The first prompt, alone: two groups for 4 tokens, layers 0 and 1 with the embedding, 4 + 2*20 ms, then layer 2 and
    # the head, 20 + 4. The second comes at 90 ms, in the first step of decodes: 1 + 3*(5 + 0.5) + 1 = 18.5 ms. Its 6
    # tokens take three groups. A layer of both takes 7*4 + 6 + 1 ms and 0.1 for each token seen, of the decode alone 5:
    #   6 seen: 7 + (35 + 0.6) + 2*(5 + 0.6) + 1 = 54.8;  7 seen: 1 + 35.7 + 2*5.7 + 1 = 49.1;
    #   8 seen: 1 + 35.8 + 2*5.8 + 7 = 55.4
    requests = [
        Request(id=0, arrival_s=0.0, prompt_tokens=4, output_tokens=5),
        Request(id=1, arrival_s=0.075, prompt_tokens=6, output_tokens=1),
    ]
    result = served(requests, by_hand(), policy=layered(group_tokens=2))
    requests_table = result.tables["requests"]
    times_s = token_times_s(result.tables["steps"], result.tables["tokens"], requests_table["first_token_s"])
    assert times_s[0] == pytest.approx([0.068, 0.0865, 0.1413, 0.1904, 0.2458])
    assert requests_table["first_token_s"] == pytest.approx([0.068, 0.2458])
    table = result.tables["layers"]
    spans = list(zip(table["first_layer"].tolist(), table["last_layer"].tolist(), strict=True))
    assert spans == [(0, 2), (2, 3), (0, 1), (1, 2), (2, 3)]


tokens = st.lists(st.tuples(st.integers(1, 3000), st.sampled_from([0, 16, 700])), min_size=1, max_size=4)
decodes = st.sampled_from([NO_DECODES, Decodes(1, 300, 300), Decodes(40, 60_000, 4000)])


@settings(max_examples=60, deadline=None)
@given(tokens=tokens, decodes=decodes, groups=st.integers(1, 20), latency=st.sampled_from([MOE, DENSE]))
def test_all_groups_together_take_what_one_pass_takes_and_the_other_steps_of_the_decodes(
    tokens, decodes, groups, latency
):
    model = latency.bound(pass_tokens=4096, stops=latency.stops)
    every = model.profile.layers
    steps = [model.layered(tokens, group, 1.0, decodes) for group in in_groups(every, groups)]
    whole, alone_s = model.timeline(tokens, 1.0, decodes), model.profile.pass_s
    if decodes.sequences:
        alone_s = model.iterations(decodes, 1).total_s
    passes = len(whole.passes)
    others_s = (groups - 1) * (alone_s + (passes - 1) * model.profile.pass_s)
    assert sum(step.total_s for step in steps) == pytest.approx(whole.total_s + others_s)
    own = whole.end.operators + (groups - 1) * (5 * every if decodes.sequences else 0)
    assert sum(step.end.operators for step in steps) == own


@settings(max_examples=30, deadline=None)
@given(tokens=tokens, decodes=decodes)
def test_a_group_of_all_layers_is_a_whole_pass(tokens, decodes):
    whole, group = MOE.timeline(tokens, 1.02, decodes), MOE.layered(tokens, range(48), 1.02, decodes)
    assert group.total_s == pytest.approx(whole.total_s)
    assert group.end.operators == whole.end.operators


def chats(most_prompt: int = 900, most_output: int = 60, alike: bool = False):
    """Up to 20 requests with prompts and outputs of any size, some at the same instant."""

    @st.composite
    def drawn(draw):
        gaps = draw(st.lists(st.sampled_from([0.0, 0.003, 0.04, 0.3]), min_size=1, max_size=20))
        arrival_s = np.cumsum(np.array(gaps) * math.pi / 3)
        requests = []
        for place, at_s in enumerate(arrival_s.tolist()):
            prompt, output = draw(st.integers(1, most_prompt)), draw(st.integers(1, most_output))
            hashes = tuple(range(min(5, prompt // 16))) if alike else ()
            one = Request(
                id=place,
                arrival_s=at_s,
                prompt_tokens=prompt,
                output_tokens=output,
                prefix_hashes=hashes,
                ttft_slo_s=0.4,
            )
            requests.append(one)
        return requests

    return drawn()


@settings(max_examples=20, deadline=None)
@given(requests=chats(), ahead=st.sampled_from([0, 1]))
def test_with_one_group_it_is_the_pass_of_whole_prompts_with_the_decodes(requests, ahead):
    options = {"async_steps": ahead, "max_sequences": 8}
    group = served(requests, policy=layered(tokens=10**6, group_tokens=10**6), **options)
    whole = served(requests, policy=ComposedPolicy("arrival", TokenBudget(10**6), "pass"), **options)
    assert "layers" not in group.tables
    for name in ("requests", "segments", "steps"):
        for column, cells in whole.tables[name].items():
            assert group.tables[name][column].tolist() == pytest.approx(cells.tolist(), nan_ok=True), column


@dataclass(eq=False)
class Sequence:
    request: Request
    done: int = 0
    taking: int = 0
    generated: int = 0


def plainly(requests, latency, *, tokens, group_tokens, seqs, ahead):
    """The paper's rules, step by step, with `ahead` steps formed before they run; first token and finish of each."""
    every = latency.profile.layers
    coming, queue, started, cohort, groups, flight = deque(requests), [], [], [], [], []
    now_s, ends_s = 0.0, math.inf
    first_s, finish_s = {}, {}

    def plan():
        nonlocal cohort, groups
        decoding = [one for one in started if 0 < one.generated < one.request.output_tokens]
        if not groups:
            cohort, room = [], tokens
            while room and (queue or any(not one.generated and one not in cohort for one in started)):
                cut = [one for one in started if not one.generated and one not in cohort]
                if not cut and len(started) == seqs:
                    break
                if not cut:
                    started.append(queue.pop(0))
                one = (cut or started)[-1 if not cut else 0]
                one.taking = min(room, one.request.prompt_tokens - one.done)
                room -= one.taking
                cohort.append(one)
            if cohort:
                groups = in_groups(every, min(every, -(-sum(one.taking for one in cohort) // group_tokens)))
        context = [one.request.prompt_tokens + one.generated for one in decoding]
        shape = Decodes(len(context), sum(context), max(context)) if context else NO_DECODES
        out = list(decoding)
        if not cohort:
            if not decoding:
                return None
            step_s = latency.iterations(shape, 1).total_s
        else:
            parts = [(one.taking, one.done) for one in cohort]
            step_s = latency.layered(parts, groups.pop(0), 1.0, shape).total_s
            if not groups:
                for one in cohort:
                    one.done += one.taking
                out += [one for one in cohort if one.done == one.request.prompt_tokens]
                cohort = []
        for one in out:
            one.generated += 1
        return step_s, [(one, one.generated) for one in out]

    while coming or queue or started or flight:
        while coming and coming[0].arrival_s <= now_s:
            queue.append(Sequence(coming.popleft()))
        while len(flight) <= ahead and (planned := plan()):
            flight.append(planned)
            if len(flight) == 1:
                ends_s = now_s + planned[0]
        if not flight:
            now_s = coming[0].arrival_s
            continue
        now_s = ends_s
        for one, count in flight.pop(0)[1]:
            first_s.setdefault(one.request.id, now_s + latency.profile.request_s)
            if count == one.request.output_tokens:
                finish_s[one.request.id] = now_s + latency.profile.request_s
                started.remove(one)
        if flight:
            ends_s = now_s + flight[0][0]
    return first_s, finish_s


@settings(max_examples=40, deadline=None)
@given(
    requests=chats(),
    tokens=st.sampled_from([300, 1200, 8192]),
    group_tokens=st.sampled_from([1, 64, 512]),
    seqs=st.sampled_from([2, 5, 64]),
    ahead=st.sampled_from([0, 1]),
    latency=st.sampled_from([MOE, DENSE]),
)
def test_the_engine_does_what_one_that_steps_plainly_does(requests, tokens, group_tokens, seqs, ahead, latency):
    rules = {"tokens": tokens, "group_tokens": group_tokens}
    first_s, finish_s = plainly(requests, latency, **rules, seqs=seqs, ahead=ahead)
    table = served(requests, latency, policy=layered(**rules), max_sequences=seqs, async_steps=ahead).tables["requests"]
    assert table["first_token_s"].tolist() == pytest.approx([first_s[one.id] for one in requests], abs=1e-9)
    assert table["finish_s"].tolist() == pytest.approx([finish_s[one.id] for one in requests], abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(
    requests=chats(alike=True),
    blocks=st.sampled_from([61, 90, 2000]),
    ahead=st.sampled_from([0, 1]),
    cache=st.booleans(),
    order=st.sampled_from(["arrival", "slack_edf"]),
    budget=st.sampled_from([300, 8192]),
)
def test_the_laws_of_a_run_hold_short_of_memory(requests, blocks, ahead, cache, order, budget):
    options = {"max_sequences": 8, "kv_blocks": blocks, "async_steps": ahead, "prefix_cache": cache}
    table = served(requests, policy=layered(order, tokens=budget, group_tokens=32), **options).tables["requests"]
    assert (table["outcome"] == "finished").all()


@settings(max_examples=15, deadline=None)
@given(requests=chats(most_prompt=400), blocks=st.sampled_from([35, 90]), at_s=st.floats(0.01, 0.6))
def test_the_laws_of_a_run_hold_where_instances_fail_and_on_disaggregated_clusters(requests, blocks, at_s):
    policy = layered(tokens=1000, group_tokens=16)
    failures = (Failure(at_s=at_s, instance=1, for_s=0.5),)
    decode = Pool(kv_blocks=blocks, max_sequences=9, policy=layered(group_tokens=16))
    for cluster in (
        Cluster.of(Pool(decode="here", instances=2, kv_blocks=blocks, failures=failures)),
        Cluster(pools={"prefill": Pool(decode="decode", instances=2, failures=failures), "decode": decode}),
    ):
        result = simulate(requests, policy=policy, latency=DENSE, cluster=cluster)
        check_result(result, cluster.hardware(DENSE))
        assert set(result.tables["requests"]["outcome"]) <= {"finished", "rejected"}


def test_a_prompt_goes_through_each_layer_once_and_has_its_first_token_after_the_last():
    requests = [Request(id=n, arrival_s=0.05 * n, prompt_tokens=1500 + n, output_tokens=30) for n in range(12)]
    result = served(requests, MOE, policy=layered(), async_steps=1)
    spans = result.tables["layers"]
    layers = dict(zip(spans["batch"].tolist(), (spans["last_layer"] - spans["first_layer"]).tolist(), strict=True))
    of_request = result.batches.groupby("request").batch.apply(lambda batches: sum(layers[one] for one in batches))
    assert of_request.tolist() == [48] * 12
    ends_s = result.segments.set_index("batch").end_s
    last_s = result.batches.groupby("request").batch.max().map(ends_s) + MOE.profile.request_s
    assert result.requests.first_token_s.tolist() == pytest.approx(last_s.tolist())


def test_a_prompt_that_loses_its_kv_between_two_groups_begins_with_the_first_layer_again():
    requests = [Request(id=n, arrival_s=0.0, prompt_tokens=300, output_tokens=150) for n in range(2)]
    requests.append(Request(id=2, arrival_s=0.3, prompt_tokens=400, output_tokens=5))
    result = served(requests, policy=layered(group_tokens=16), kv_blocks=66)
    table, spans = result.tables["requests"], result.tables["layers"]
    assert table["evictions"].tolist() == [0, 0, 1]
    assert table["recomputed_tokens"][2] == 0  # no token of it had been through all layers
    mine = np.isin(spans["batch"], result.tables["batches"]["batch"][result.tables["batches"]["request"] == 2])
    starts = spans["first_layer"][mine]
    assert (starts == 0).sum() == 2
    assert np.diff(starts).min() < -1


def test_experts_are_loaded_once_for_a_prompt_and_not_for_each_of_its_chunks():
    """An 8192-token prompt beside decodes: seconds of the experts, in chunks of 512 and in 16 groups of layers."""
    bare = LatencyModel(replace(MOE.profile, experts={}))

    def experts_s(steps):
        return sum(steps(MOE)) - sum(steps(bare))

    shares = []
    for number in (1, 8, 32):
        beside = Decodes(number, 1000 * number, 1000)
        chunked_s = experts_s(
            lambda model, beside=beside: [
                model.timeline([(512, 512 * chunk)], 1.0, beside).total_s for chunk in range(16)
            ]
        )
        layered_s = experts_s(
            lambda model, beside=beside: [
                model.layered([(8192, 0)], group, 1.0, beside).total_s for group in in_groups(48, 16)
            ]
        )
        shares.append(layered_s / chunked_s)
    assert shares == sorted(shares)  # what decodes touch in each step anyway cannot be saved
    assert shares == pytest.approx([0.32, 0.58, 0.93], abs=0.03)


def test_what_is_left_of_a_prompt_between_two_groups_is_its_share_of_the_layers():
    job = make_job(0, 4000)
    view = make_view(waiting=[job], latency=MOE)
    before_s = view.left_s(job)
    job.done_layers, job.layered_tokens = 12, 4000
    request_s = MOE.profile.request_s
    assert view.left_s(job) - request_s == pytest.approx(0.75 * (before_s - request_s))


def test_all_groups_of_a_prompt_are_predicted_to_take_what_they_take():
    job = make_job(0, 4000)
    view = make_view(waiting=[job], latency=MOE)
    predicted_s = sum(view.cost_s([Part(job, 4000)], layers=group) - view.request_s for group in in_groups(48, 8))
    took_s = sum(MOE.layered([(4000, 0)], group).total_s for group in in_groups(48, 8))
    assert predicted_s == pytest.approx(took_s - 7 * MOE.profile.pass_s)


@pytest.mark.parametrize(
    ("layers", "tokens", "said"),
    [
        (None, 700, "to go on from there"),
        (range(8), 700, "to go on from there"),
        (range(4, 8), 300, "to go on from there, with all of them"),
        (range(4, 99), 700, "within the model's 48 layers"),
    ],
)
def test_a_prompt_between_two_groups_goes_on_from_where_it_stopped(layers, tokens, said):
    class Own:
        """Four layers of a prompt, and then something else."""

        stops = layered().stops

        def select(self, view):
            if view.running is not None:
                return view.running
            job = next(iter(view.waiting))
            if not job.done_layers:
                return Batch([Part(job, job.left_tokens)], layers=range(4))
            return Batch([Part(job, tokens)], layers=layers)

    with pytest.raises(PolicyError, match=said):
        served([Request(id=0, arrival_s=0.0, prompt_tokens=700)], MOE, policy=Own())


def test_decodes_alone_go_through_all_layers():
    class Own:
        stops = layered().stops

        def select(self, view):
            if view.running is not None:
                return view.running
            if view.decoding:
                return Batch([], view.decoding, range(8))
            return Batch([Part(job, job.left_tokens) for job in view.waiting])

    with pytest.raises(PolicyError, match="decodes alone, which go through all"):
        served([Request(id=0, arrival_s=0.0, prompt_tokens=700, output_tokens=2)], MOE, policy=Own())


def test_ranks_that_share_experts_refuse_steps_whose_layers_differ():
    requests = [Request(id=0, arrival_s=0.0, prompt_tokens=700, output_tokens=2)]
    with pytest.raises(PolicyError, match="expert_parallel=false"):
        served(requests, MOE, policy=layered(), instances=2, expert_parallel=True, collective=LINK)


@pytest.mark.parametrize("batching", [{"tokens": 0}, {"group_tokens": 0}, {"group_tokens": 1.5}])
def test_budgets_are_whole_numbers_of_at_least_1(batching):
    with pytest.raises(ValueError, match="LayerGroups"):
        LayerGroups(**batching)


def test_nothing_waits_between_two_groups_and_causes_of_misses_add_up():
    rows = [(0.02 * place, 200 + 317 * place % 3000) for place in range(80)]
    requests = [
        Request(id=place, arrival_s=at_s, prompt_tokens=count, output_tokens=20, ttft_slo_s=0.5)
        for place, (at_s, count) in enumerate(rows)
    ]
    policy = make(compose(["policy=layered_prefill"]), "policy")
    result = served(requests, policy=policy)
    queue = waiting(result.tables)
    waited_s = np.bincount(queue.request, weights=queue.end_s - queue.start_s)
    assert waited_s == pytest.approx(result.tables["requests"]["queued_s"], abs=1e-9)
    missed = int((result.tables["requests"]["met_slo"] == False).sum())  # noqa: E712 (an array)
    causes = misses_by_cause(explain(result))
    assert missed > 10
    assert sum(sum(by_class.values()) for by_class in causes.values()) == missed
