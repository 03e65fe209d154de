"""Engines that decode: against an engine that steps plainly, on random cases, and by the laws of a run."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowsim import (
    Alone,
    ComposedPolicy,
    LatencyModel,
    Request,
    Result,
    SLOAware,
    TokenBudget,
    load_profile,
    simulate,
)
from flowsim.check import check_result
from flowsim.config import build, compose
from flowsim.core import PolicyError
from flowsim.kv import PrefixPool
from flowsim.latency import NO_DECODES, Decodes
from flowsim.pool import Cluster, Link, Pool
from flowsim.timeline import Iterations, Stops
from flowsim.tokens import token_times_s
from flowsim.variants import choices_of
from flowsim.workload import sessions

PRO = LatencyModel(load_profile("llama3-8b", "rtxpro6000"))
A100 = LatencyModel(load_profile("llama3-8b", "a100"))
SIZE = 16


@dataclass(eq=False)
class Sequence:
    request: Request
    target: int
    done: int = 0
    generated: int = 0
    held: int = 0


def plainly(requests, latency, *, tokens, seqs, blocks, ahead):
    """vLLM's rules, a step at a time, with `ahead` steps formed before they run; first token and finish of each."""
    coming, waiting, running, flight = deque(requests), [], [], []
    free, now_s, ends_s = blocks, 0.0, math.inf
    first_s, finish_s = {}, {}

    def plan():
        nonlocal free
        parts, decodes, room, evicted = [], [], tokens, False
        for one in list(running):
            if one not in running or one.done < one.target or one.generated >= one.request.output_tokens:
                continue
            need = -(-(one.request.prompt_tokens + one.generated) // SIZE)
            while one in running and need - one.held > free:
                last = [x for x in running if x.generated < x.request.output_tokens][-1]
                running.remove(last)
                free, last.held, last.done, evicted = free + last.held, 0, 0, True
                last.target = last.request.prompt_tokens + last.generated
                waiting.insert(0, last)
            if one in running:
                free, one.held = free - (need - one.held), need
        for one in running:
            if one.done == one.target and one.generated < one.request.output_tokens:
                decodes.append(one)
                room -= 1
        for one in running:
            if one.done < one.target and room > 0:
                parts.append((one, min(room, one.target - one.done)))
                room -= parts[-1][1]
        while waiting and room > 0 and not evicted and len(running) < seqs:
            one, need = waiting[0], -(-waiting[0].target // SIZE)
            if need > free:
                break
            waiting.pop(0)
            running.append(one)
            free, one.held = free - need, need
            parts.append((one, min(room, one.target)))
            room -= parts[-1][1]
        if not parts and not decodes:
            return None
        context = [one.request.prompt_tokens + one.generated for one in decodes]
        shape = Decodes(len(context), sum(context), max(context)) if context else NO_DECODES
        done = [(new, one.done) for one, new in parts]
        step_s = latency.timeline(done, 1.0, shape).total_s if parts else latency.iterations(shape, 1).total_s
        for one, new in parts:
            one.done += new
        out = decodes + [one for one, _ in parts if one.done == one.target]
        for one in out:
            one.generated += 1
        return step_s, [(one, one.generated) for one in out]

    while coming or waiting or running or flight:
        while coming and coming[0].arrival_s <= now_s:
            waiting.append(Sequence(coming[0], coming.popleft().prompt_tokens))
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
                free += one.held
                running.remove(one)
        if flight:
            ends_s = now_s + flight[0][0]
    return first_s, finish_s


def served(requests, latency=PRO, *, policy=None, **pool) -> Result:
    """A run on one engine, with its laws checked."""
    cluster = Pool(**{"decode": "here", **pool})
    policy = policy or ComposedPolicy("arrival", TokenBudget(2048), "pass")
    result = simulate(requests, policy=policy, latency=latency, cluster=cluster)
    check_result(result, Cluster.of(cluster).hardware(latency))
    return result


@st.composite
def chats(draw, most_prompt=900, most_output=60):
    """Up to 20 requests with prompts and outputs of any size, some at the same instant."""
    gaps = draw(st.lists(st.sampled_from([0.0, 0.003, 0.04, 0.3]), min_size=1, max_size=20))
    arrival_s = np.cumsum(np.array(gaps) * math.pi / 3)
    return [
        Request(
            id=place,
            arrival_s=float(at_s),
            prompt_tokens=draw(st.integers(1, most_prompt)),
            output_tokens=draw(st.integers(1, most_output)),
        )
        for place, at_s in enumerate(arrival_s)
    ]


@settings(max_examples=40, deadline=None)
@given(
    requests=chats(),
    tokens=st.sampled_from([64, 300, 2048]),
    seqs=st.sampled_from([2, 5, 64]),
    blocks=st.sampled_from([61, 90, 2000]),
    ahead=st.sampled_from([0, 1]),
)
def test_the_engine_does_what_one_that_steps_plainly_does(requests, tokens, seqs, blocks, ahead):
    first_s, finish_s = plainly(requests, PRO, tokens=tokens, seqs=seqs, blocks=blocks, ahead=ahead)
    policy = ComposedPolicy("arrival", TokenBudget(tokens), "pass")
    table = served(requests, policy=policy, max_sequences=seqs, kv_blocks=blocks, async_steps=ahead).tables["requests"]
    assert table["first_token_s"].tolist() == pytest.approx([first_s[one.id] for one in requests], abs=1e-9)
    assert table["finish_s"].tolist() == pytest.approx([finish_s[one.id] for one in requests], abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(
    requests=chats(),
    blocks=st.sampled_from([61, 90, 2000]),
    ahead=st.sampled_from([0, 1]),
    cache=st.booleans(),
    policy=st.sampled_from(["chunks", "whole", "deadline"]),
)
def test_the_laws_of_a_run_hold_on_every_engine(requests, blocks, ahead, cache, policy):
    policies = {
        "chunks": ComposedPolicy("arrival", TokenBudget(128, chunk=48), "pass"),
        "whole": ComposedPolicy("arrival", Alone(), "pass"),
        "deadline": ComposedPolicy("slack_edf", SLOAware(512), "operator" if not ahead else "pass"),
    }
    options = {"max_sequences": 8, "kv_blocks": blocks, "async_steps": ahead, "prefix_cache": cache}
    table = served(requests, policy=policies[policy], **options).tables["requests"]
    assert (table["outcome"] == "finished").all()


@settings(max_examples=15, deadline=None)
@given(requests=chats(), blocks=st.sampled_from([61, 2000]))
def test_an_engine_asked_only_where_something_changes_takes_a_bounded_number_of_events(requests, blocks):
    result = served(requests, kv_blocks=blocks)
    joins = len(requests) + int(result.tables["requests"]["evictions"].sum())
    assert result.run["events"] <= 8 * joins + 60 * (blocks == 61)


@settings(max_examples=25, deadline=None)
@given(
    requests=chats(most_prompt=400, most_output=120),
    shared=st.integers(0, 9),
    blocks=st.sampled_from([35, 60, 90]),
    seqs=st.sampled_from([2, 9]),
    cache=st.booleans(),
    stops=st.sampled_from(["operator", "block", "pass"]),
)
def test_the_laws_of_a_run_hold_on_disaggregated_clusters_short_of_memory(requests, shared, blocks, seqs, cache, stops):
    """Prompts that share their first blocks; two prefill instances before one that decodes and recomputes."""
    requests = [
        replace(one, prefix_hashes=tuple(range(min(shared, one.prompt_tokens // SIZE))), ttft_slo_s=0.2)
        for one in requests
    ]
    memory = {"kv_blocks": blocks, "prefix_cache": cache}
    decode = Pool(**memory, max_sequences=seqs, policy=ComposedPolicy("arrival", TokenBudget(2048), "pass"))
    cluster = Cluster(pools={"prefill": Pool(**memory, decode="decode", instances=2), "decode": decode})
    policy = ComposedPolicy("slack_edf", SLOAware(512), stops)
    result = simulate(requests, policy=policy, latency=A100, cluster=cluster)
    check_result(result, cluster.hardware(A100))
    assert set(result.tables["requests"]["outcome"]) <= {"finished", "rejected"}


def test_the_tokens_between_two_decisions_cost_no_event():
    short, long = ([Request(id=0, arrival_s=0.0, prompt_tokens=50, output_tokens=n)] for n in (2, 2000))
    assert served(long).run["events"] == served(short).run["events"]


def test_a_decode_run_ends_early_for_a_request_that_can_join():
    first = Request(id=0, arrival_s=0.0, prompt_tokens=50, output_tokens=500)
    second = Request(id=1, arrival_s=1.0, prompt_tokens=50, output_tokens=1)
    table = served([first, second]).tables["requests"]
    step_s = PRO.iterations(Decodes(1, 200, 200), 1).total_s
    assert 0.0 < table["start_s"][1] - 1.0 < step_s


def test_the_time_between_tokens_is_that_of_the_steps():
    """Two decodes at once: the mean is the steps' mean, and the largest holds the other's prefill."""
    requests = [
        Request(id=0, arrival_s=0.0, prompt_tokens=100, output_tokens=300, tbt_slo_s=1.0),
        Request(id=1, arrival_s=1.0, prompt_tokens=2000, output_tokens=50, tbt_slo_s=1e-4),
    ]
    result = served(requests)
    table = result.tables["requests"]
    times_s = token_times_s(result.tables["steps"], result.tables["tokens"], table["first_token_s"])[0]
    gaps_s = np.diff(times_s)
    assert len(gaps_s) == 299
    assert table["tbt_mean_s"][0] == pytest.approx(gaps_s.mean())
    assert table["tbt_p99_s"][0] == pytest.approx(np.percentile(gaps_s, 99))
    assert table["tbt_max_s"][0] == gaps_s.max() > 4 * np.median(gaps_s)
    assert table["met_tbt"].tolist() == [True, False]
    assert result.summary()["tbt_attainment"] == result.summary()["joint_attainment"] == 0.5


def test_a_whole_prompt_in_the_cache_still_computes_a_token_and_hits_are_counted_once():
    """Edge cases 19 and 20: the second finds all 256 tokens but the last block; chunks do not count it again."""
    ids = tuple(range(16))
    requests = [
        Request(id=place, arrival_s=float(place), prompt_tokens=256, output_tokens=3, prefix_hashes=ids)
        for place in range(2)
    ]
    policy = ComposedPolicy("arrival", TokenBudget(7), "pass")
    result = served(requests, policy=policy, prefix_cache=True)
    table, batches = result.tables["requests"], result.tables["batches"]
    assert table["cached_tokens"].tolist() == [0, 240]
    second = batches["request"] == 1
    assert batches["tokens"][second].tolist() == [7, 7, 2]
    assert batches["cached_tokens"][second].tolist() == [240, 247, 254]


def test_the_prefix_cache_serves_sessions_on_a_prefill_pool_too():
    requests = sessions(num_sessions=30, rate_rps=2.0, seed=3)
    cold, warm = (
        simulate(requests, policy=ComposedPolicy("arrival", Alone(), "request"), latency=A100, cluster=pool)
        for pool in (Pool(), Pool(prefix_cache=True))
    )
    check_result(warm, A100)
    assert warm.tables["requests"]["cached_tokens"].sum() > 0.3 * sum(one.prompt_tokens for one in requests)
    assert warm.summary()["ttft_s"]["mean"] < cold.summary()["ttft_s"]["mean"]


def test_what_is_lost_to_the_growth_of_others_is_counted_and_recomputed():
    requests = [Request(id=n, arrival_s=0.0, prompt_tokens=400, output_tokens=200) for n in range(4)]
    without = served(requests, kv_blocks=110)
    table = without.tables["requests"]
    assert table["evictions"].sum() > 0
    assert (table["recomputed_tokens"][table["evictions"] > 0] >= 400).all()
    kept = served(requests, kv_blocks=110, prefix_cache=True).tables["requests"]
    assert 0 < kept["recomputed_tokens"].sum() < table["recomputed_tokens"].sum()
    decode = without.summary()["decode"]
    assert (decode["evictions"], decode["recomputed_tokens"]) == (
        table["evictions"].sum(),
        table["recomputed_tokens"].sum(),
    )


def test_a_sequence_that_made_room_for_nobody_starts_again_once_blocks_are_free():
    """Planned ahead: the second outgrows its blocks while the first, in its last step, still holds its own."""
    requests = [
        Request(id=0, arrival_s=0.0, prompt_tokens=310, output_tokens=2),
        Request(id=1, arrival_s=0.0, prompt_tokens=319, output_tokens=5),
    ]
    table = served(requests, kv_blocks=40, async_steps=1).tables["requests"]
    _, finish_s = plainly(requests, PRO, tokens=2048, seqs=100, blocks=40, ahead=1)
    assert table["evictions"].tolist() == [0, 1]
    assert table["finish_s"].tolist() == pytest.approx([finish_s[0], finish_s[1]])


def test_what_the_whole_pool_cannot_hold_with_its_answer_is_rejected():
    requests = [Request(id=n, arrival_s=0.0, prompt_tokens=400, output_tokens=out) for n, out in ((0, 81), (1, 82))]
    table = served(requests, kv_blocks=30).tables["requests"]
    assert table["outcome"].tolist() == ["finished", "rejected"]


def test_the_horizon_leaves_sequences_unfinished_and_loses_none():
    requests = [Request(id=n, arrival_s=0.1 * n, prompt_tokens=300, output_tokens=500) for n in range(30)]
    for ahead in (0, 1):
        result = simulate(
            requests,
            policy=ComposedPolicy("arrival", TokenBudget(2048), "pass"),
            latency=PRO,
            cluster=Pool(decode="here", async_steps=ahead, max_sequences=10),
            horizon_s=9.0,
        )
        check_result(result)
        assert 0 < result.summary()["unfinished"] < 30 - 1


def test_a_policy_that_stops_inside_passes_cannot_be_planned_ahead():
    with pytest.raises(PolicyError, match="stops=pass"):
        served([], policy=ComposedPolicy("arrival", Alone(), "operator"), async_steps=1)


@pytest.mark.parametrize("policy", choices_of("policy"))
def test_every_shipped_policy_serves_an_engine_that_decodes_or_says_what_it_would_have_to_be(policy):
    scarce = ["workload=azure_conv", "workload.rate_rps=8", "workload.num_requests=40", "cluster.kv_blocks=900"]
    setup = build(compose([f"policy={policy}", *scarce, "cluster=colocated", "cluster.async_steps=0"]))
    result = setup.run()
    check_result(result, Cluster.of(setup.cluster).hardware(setup.latency))
    assert result.summary()["finished"] == 40
    ahead = build(compose([f"policy={policy}", *scarce, "cluster=colocated"]))
    if setup.policy.stops.operators:
        with pytest.raises(PolicyError, match=r"stops=pass or request .* where batches run to their ends"):
            ahead.run()
    else:
        check_result(ahead.run(), Cluster.of(ahead.cluster).hardware(ahead.latency))


@pytest.mark.parametrize("ahead", [0, 1])
def test_ranks_that_share_experts_run_each_step_to_its_end_whatever_comes_meanwhile(ahead):
    moe = LatencyModel(load_profile("qwen3-30b-a3b", "rtxpro6000"))
    link = Link(latency_s=4e-5, bytes_per_s=16e9)
    cluster = Pool(decode="here", instances=2, async_steps=ahead, expert_parallel=True, collective=link)
    requests = [
        Request(id=n, arrival_s=0.01 * n, prompt_tokens=4000 - 90 * n, output_tokens=9, ttft_slo_s=9.0 - 0.2 * n)
        for n in range(40)
    ]
    policy = ComposedPolicy("slack_edf", TokenBudget(2048), "pass")
    eager = ComposedPolicy("slack_edf", Alone(), "pass")
    for own in (policy, eager):
        result = simulate(requests, policy=own, latency=moe, cluster=cluster)
        check_result(result, cluster.hardware(moe))
        assert result.summary()["preemptions"]["count"] == 0
    with pytest.raises(PolicyError, match="expert_parallel"):
        simulate([], policy=ComposedPolicy("arrival", Alone(), "operator"), latency=moe, cluster=cluster)


def test_equal_contexts_cost_no_skew_and_unequal_ones_what_the_longest_is_beyond_the_mean():
    plain, skewed = (LatencyModel(PRO.profile, decode_skew=skew) for skew in (0.0, 0.5))
    even, uneven = Decodes(4, 4000, 1000), Decodes(4, 4000, 3000)
    assert (
        plain.iterations(even, 1).total_s == skewed.iterations(even, 1).total_s == plain.iterations(uneven, 1).total_s
    )
    beyond_s = skewed.iterations(uneven, 1).total_s - plain.iterations(uneven, 1).total_s
    per_token_s = PRO.profile.decode_attention[1].coefficients["sum_kv"] * PRO.profile.layers
    assert beyond_s == pytest.approx(0.5 * (4 * 3000 - 4000) * per_token_s)


@given(
    first_s=st.floats(1e-4, 1.0), growth_s=st.floats(0.0, 1e-3), count=st.integers(1, 400), share=st.floats(0.0, 1.0)
)
def test_a_run_of_steps_stops_at_the_end_of_the_step_it_is_in(first_s, growth_s, count, share):
    run = Iterations(first_s, growth_s, count, 5)
    at_s = share * run.total_s
    stop = run.next_stop(at_s, Stops.PASS)
    ends_s = np.cumsum(first_s + growth_s * np.arange(count))
    assert stop.at_s == pytest.approx(ends_s[stop.operators // 5 - 1], rel=1e-9)
    assert stop.at_s >= at_s - 2e-9
    assert stop.operators == 5 or run.end_s(stop.operators // 5 - 1) < at_s + 2e-9
    assert [one.operators for one in run.boundaries(Stops.PASS)] == [5 * step for step in range(1, count + 1)]
    assert run.at(stop.operators, Stops.PASS) == pytest.approx(stop.at_s)


@given(
    st.lists(st.tuples(st.sampled_from(["take", "grow", "give"]), st.integers(0, 5), st.integers(1, 6)), max_size=60)
)
def test_a_pool_that_remembers_never_loses_a_block_nor_gives_one_to_two_that_differ(moves):
    pool, held = PrefixPool(20), {}
    for kind, owner, blocks in moves:

        def named(place, owner=owner):  # the first two are everybody's
            return place if place < 2 else (owner, place)

        if kind == "take" and owner not in held and pool.needs(named, blocks) <= pool.free_blocks:
            found = pool.hits(named, blocks - 1)
            pool.take(owner, blocks, named)
            pool.fill(owner, blocks, named)
            held[owner] = blocks
            assert found < blocks
        elif kind == "grow" and owner in held and blocks <= pool.free_blocks:
            pool.grow(owner, blocks)
            held[owner] += blocks
        elif kind == "give" and owner in held:
            pool.give(owner)
            del held[owner]
            assert pool.held(owner) == 0
        assert {one: pool.held(one) for one in held} == held
        shared = sum(held.values()) - (pool.total_blocks - pool.free_blocks)
        assert 0 <= shared <= 2 * max(0, len(held) - 1)
    for owner in held:
        pool.give(owner)
    assert pool.free_blocks == pool.total_blocks


def test_ranks_that_share_experts_end_their_steps_together_and_wait_for_one_another():
    moe = LatencyModel(load_profile("qwen3-30b-a3b", "rtxpro6000"))
    link = Link(latency_s=4e-5, bytes_per_s=16e9)
    cluster = Pool(decode="here", instances=2, async_steps=1, expert_parallel=True, collective=link, max_sequences=64)
    requests = [
        Request(id=n, arrival_s=0.03 * n, prompt_tokens=20 + 900 * (n % 2), output_tokens=40) for n in range(12)
    ]
    policy = ComposedPolicy("arrival", TokenBudget(2048), "pass")
    result = simulate(requests, policy=policy, latency=moe, cluster=cluster)
    check_result(result, Cluster.of(cluster).hardware(moe))
    segments = result.tables["segments"]
    over_s = segments["end_s"] + segments["barrier_s"]
    ends_s = [set(np.round(over_s[segments["instance"] == rank], 9)) for rank in (0, 1)]
    both = [at for at in ends_s[0] if min(ends_s[1]) <= at <= max(ends_s[1])]
    assert len(both) > 20
    assert set(both) <= ends_s[1]
    alone = served([replace(requests[1], id=0)], moe, async_steps=1).tables["requests"]["tbt_mean_s"][0]
    assert result.tables["requests"]["tbt_mean_s"].min() > 0.5 * alone
    assert moe.profile.layers * 2 * link.latency_s < segments["barrier_s"].min()
