"""Failures where KV is decoded or on its way: it is computed again, prompt and tokens, and no token comes out twice."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowsim import (
    Alone,
    Cluster,
    ComposedPolicy,
    LatencyModel,
    Pool,
    Request,
    Result,
    SLOAware,
    TokenBudget,
    load_profile,
    simulate,
)
from flowsim.check import check_result
from flowsim.config import build, compose
from flowsim.hybrid import HybridChunked
from flowsim.pool import Failure, Link
from flowsim.router import LeastWork, RoundRobin
from flowsim.tokens import token_times_s

LATENCY = LatencyModel(load_profile("llama3-8b", "a100"))


def fcfs() -> ComposedPolicy:
    return ComposedPolicy("arrival", Alone(), "request")


def failures(*rows: tuple[float, int, float]) -> tuple[Failure, ...]:
    return tuple(Failure(at_s=at_s, instance=instance, for_s=for_s) for at_s, instance, for_s in rows)


def pd(prefill: dict | None = None, decode: dict | None = None, link: Link | None = None) -> Cluster:
    pools = {
        "prefill": Pool(decode="decode", **(prefill or {})),
        "decode": Pool(**{"policy": HybridChunked(), **(decode or {})}),
    }
    return Cluster(pools=pools, link=link or Link())


def requests_of(*rows: tuple[float, int, int]) -> list[Request]:
    return [
        Request(id=number, arrival_s=at, prompt_tokens=prompt, output_tokens=output)
        for number, (at, prompt, output) in enumerate(rows)
    ]


def run(requests: list[Request], cluster: Cluster | Pool, policy: object = None, **options: object) -> Result:
    """`simulate` with the laws of a run checked."""
    result = simulate(requests, policy=policy or fcfs(), latency=LATENCY, cluster=cluster, **options)
    check_result(result, Cluster.of(cluster).hardware(LATENCY))
    return result


def token_seconds(result: Result, request: int = 0) -> np.ndarray:
    tables = result.tables
    return token_times_s(tables["steps"], tables["tokens"], tables["requests"]["first_token_s"])[request]


def test_a_decode_instance_that_fails_keeps_no_kv_but_the_tokens_that_came_out_stay():
    requests = requests_of((0.0, 2000, 400))
    whole = run(requests, pd())
    at_s = 3.0
    out = int((token_seconds(whole) <= at_s + LATENCY.profile.request_s).sum())
    result = run(requests, pd(decode={"instances": 2, "failures": failures((at_s, 0, 100.0))}))
    row = result.requests.iloc[0]
    times_s = token_seconds(result)
    assert (row.outcome, row.requeued, row.recomputed_tokens) == ("finished", 1, 2000 + out)
    assert times_s[:out] == pytest.approx(token_seconds(whole)[:out])
    alone_s = run(requests_of((0.0, 2000 + out, 1)), pd()).requests.ttft_s[0]
    # the prefill of prompt and tokens gives the next one, and only then goes on to decode
    again = result.tables["batches"]["tokens"].tolist()
    assert again == [2000, 2000 + out]
    assert times_s[out] == pytest.approx(at_s + alone_s)
    assert len(times_s) == 400
    assert (row.prefill_instance, row.decode_instance) == (0, 2)
    assert result.summary()["failures"]["recomputed_tokens"] == 2000 + out


def test_a_transfer_whose_target_fails_is_made_again_from_the_memory_that_still_has_it():
    link = Link(latency_s=0.0, bytes_per_s=1e9)
    first = run(requests_of((0.0, 3000, 20)), pd(link=link)).requests.iloc[0]
    at_s = 0.5 * (first.transfer_start_s + first.transfer_end_s)
    result = run(
        requests_of((0.0, 3000, 20)), pd(decode={"instances": 2, "failures": failures((at_s, 0, 50.0))}, link=link)
    )
    row, table = result.requests.iloc[0], result.tables["transfers"]
    assert (row.requeued, row.recomputed_tokens) == (0, 0)
    assert table["failed"].tolist() == [True, False]
    assert table["target"].tolist() == [1, 2]
    assert table["bytes"][0] == pytest.approx(0.5 * table["bytes"][1])
    assert row.transfer_start_s == pytest.approx(first.transfer_end_s)  # that is when its end of the link is free


def test_a_transfer_whose_source_fails_is_lost_and_its_prompt_is_computed_again():
    link = Link(latency_s=0.0, bytes_per_s=1e9)
    first = run(requests_of((0.0, 3000, 20)), pd(link=link)).requests.iloc[0]
    at_s = 0.5 * (first.transfer_start_s + first.transfer_end_s)
    result = run(requests_of((0.0, 3000, 20)), pd({"instances": 2, "failures": failures((at_s, 0, 50.0))}, link=link))
    row = result.requests.iloc[0]
    assert (row.requeued, row.recomputed_tokens, row.prefill_instance) == (1, 3001, 0)
    assert result.tables["transfers"]["failed"].tolist() == [True, False]
    assert row.first_token_s == first.first_token_s
    assert len(token_seconds(result)) == 20


def test_while_no_decode_instance_is_up_prefills_keep_their_kv_and_wait():
    requests = requests_of(*[(0.1 * number, 500, 10) for number in range(6)])
    result = run(requests, pd(decode={"instances": 2, "failures": failures((0.01, 0, 20.0), (0.02, 1, 30.0))}))
    table = result.requests
    assert (table.requeued == 0).all()
    assert table.first_token_s.max() < 2.0
    assert table.transfer_start_s.min() == pytest.approx(20.01)
    assert (table.decode_instance == 1).all()  # the first that is back takes what was to go to both


@pytest.mark.parametrize("async_steps", [0, 1])
def test_an_engine_that_fails_hands_its_sequences_on_and_no_token_comes_out_twice(async_steps):
    requests = requests_of(*[(0.05 * number, 400, 200) for number in range(8)])
    engine = {"instances": 2, "decode": "here", "async_steps": async_steps}
    policy = ComposedPolicy("arrival", TokenBudget(512), "pass")
    whole = run(requests, Pool(**engine), policy)
    result = run(requests, Pool(**engine, failures=failures((1.5, 0, 2.0))), policy)
    lost = result.requests[result.requests.requeued == 1]
    assert len(lost) == 4
    for number in lost.id:
        before_s, after_s = token_seconds(whole, number), token_seconds(result, number)
        out = int((before_s <= 1.5 + LATENCY.profile.request_s).sum())
        assert len(after_s) == 200
        assert after_s[:out] == pytest.approx(before_s[:out])
        assert after_s[out] > 1.5
        assert lost.recomputed_tokens[number] == 400 + out
    assert (result.requests.evictions == 0).all()


def rows_of(draw: st.DrawFn, instances: int) -> tuple[Failure, ...]:
    """Up to two failures of each instance that do not overlap."""
    rows = []
    for instance in range(instances):
        at_s = 0.0
        for gap_s, for_s in draw(st.lists(st.tuples(st.floats(0.01, 3.0), st.floats(0.01, 3.0)), max_size=2)):
            rows.append((at_s + gap_s, instance, for_s))
            at_s += gap_s + for_s
    return failures(*rows)


@st.composite
def disaggregated(draw: st.DrawFn) -> Cluster:
    """One to three instances a pool that fail, tight or ample KV, a fast or slow link, with prefix caches or none."""
    prefill, decode = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    cached = draw(st.booleans())
    return pd(
        {
            "instances": prefill,
            "failures": rows_of(draw, prefill),
            "kv_blocks": draw(st.sampled_from([80, 400, None])),
            "policy": draw(
                st.sampled_from(
                    [None, HybridChunked(tokens=300, chunk=100), ComposedPolicy("slack_edf", SLOAware(), "layer")]
                )
            ),
            "prefix_cache": cached,
        },
        {
            "instances": decode,
            "failures": rows_of(draw, decode),
            "kv_blocks": draw(st.sampled_from([90, 300, None])),
            "max_sequences": draw(st.sampled_from([None, 1, 3])),
            "prefix_cache": cached,
        },
        Link(latency_s=draw(st.sampled_from([0.0, 0.3])), bytes_per_s=draw(st.sampled_from([2e8, 25e9, math.inf]))),
    )


@st.composite
def engines(draw: st.DrawFn) -> Pool:
    """One to three colocated engines that fail, planned ahead or not, with tight or ample KV."""
    instances = draw(st.integers(1, 3))
    return Pool(
        instances=instances,
        decode="here",
        failures=rows_of(draw, instances),
        kv_blocks=draw(st.sampled_from([80, 200, None])),
        max_sequences=draw(st.sampled_from([None, 2, 5])),
        async_steps=draw(st.sampled_from([0, 1])),
        prefix_cache=draw(st.booleans()),
        policy=draw(
            st.sampled_from(
                [ComposedPolicy("arrival", TokenBudget(256), "pass"), HybridChunked(tokens=200, chunk=64, age_s=1.0)]
            )
        ),
    )


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    gap = st.floats(0.0, 0.6).map(lambda gap_s: 0.0 if gap_s < 0.2 else gap_s)
    rows = draw(st.lists(st.tuples(gap, st.integers(1, 900), st.integers(1, 60)), max_size=20))
    arrivals = np.cumsum([row[0] for row in rows])
    return requests_of(*[(float(at), row[1], row[2]) for at, row in zip(arrivals, rows, strict=True)])


@settings(max_examples=80, deadline=None)
@given(
    cluster=st.one_of(disaggregated(), engines()),
    requests=workloads(),
    router=st.sampled_from([RoundRobin, LeastWork]),
)
def test_whatever_fails_where_kv_is_decoded_or_moved_no_request_is_lost_and_the_run_ends(cluster, requests, router):
    result = run(requests, cluster, router=router())
    assert set(result.requests.outcome) <= {"finished", "rejected"}
    calm = run(requests, without_failures(cluster), router=router())
    too_large = result.requests.outcome == "rejected"
    requeued = result.tables["requests"].get("requeued", np.zeros(len(requests)))
    # only what no longer fits a prefill instance, with the tokens it has, is rejected though it was accepted
    assert (requeued[(too_large & (calm.requests.outcome == "finished")).to_numpy()] > 0).all()
    assert (too_large[(calm.requests.outcome == "rejected").to_numpy()]).all()
    assert run(requests, cluster, router=router()).requests.equals(result.requests)


def without_failures(cluster: Cluster | Pool) -> Cluster | Pool:
    if isinstance(cluster, Pool):
        return replace(cluster, failures=())
    return replace(cluster, pools={name: replace(pool, failures=()) for name, pool in cluster.pools.items()})


@settings(max_examples=40, deadline=None)
@given(cluster=st.one_of(disaggregated(), engines()), requests=workloads(), horizon_s=st.floats(0.1, 5.0))
def test_a_horizon_at_any_time_leaves_each_request_one_outcome(cluster, requests, horizon_s):
    result = run(requests, cluster, horizon_s=horizon_s)
    assert len(result.requests) == sum(request.arrival_s <= horizon_s for request in requests)


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster=pd", "cluster.pools.decode.failures=[{at_s: 20, instance: 0, for_s: 5}]"],
        ["cluster=pd", "cluster.pools.prefill.failures=[{at_s: 20, instance: 0, for_s: 5}]"],
        ["cluster=colocated", "policy=vllm", "cluster.failures=[{at_s: 20, instance: 0, for_s: 5}]"],
    ],
)
def test_the_shipped_clusters_that_decode_read_failures_and_write_them(tmp_path, overrides):
    rate = ["workload=azure_conv", "workload.num_requests=150", "workload.rate_rps=3"]
    setup = build(compose([*overrides, *rate]))
    result = setup.run()
    check_result(result, setup.cluster.hardware(setup.latency))
    figures = result.summary()["failures"]
    assert figures["requeued"] > 0
    assert figures["recomputed_tokens"] > 0
    result.save(tmp_path)
    again = Result.load(tmp_path)
    check_result(again, setup.cluster.hardware(setup.latency))
    assert again.requests.equals(result.requests)
