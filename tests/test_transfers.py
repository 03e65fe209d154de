"""Disaggregated clusters: a prefill's KV moves over a link to the instance that decodes it."""

from __future__ import annotations

import math

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
    load_profile,
    simulate,
)
from flowsim.check import check_result
from flowsim.config import build, compose
from flowsim.core import PolicyError
from flowsim.hybrid import HybridChunked
from flowsim.pool import Link
from flowsim.router import RoundRobin

LATENCY = LatencyModel(load_profile("llama3-8b", "a100"))
TOKEN_BYTES = LATENCY.profile.kv_bytes_per_token


def fcfs() -> ComposedPolicy:
    return ComposedPolicy("arrival", Alone(), "request")


def pd(link: Link | None = None, prefill: Pool | None = None, **decode: object) -> Cluster:
    decode = {"policy": HybridChunked(), **decode}
    return Cluster(pools={"prefill": prefill or Pool(decode="decode"), "decode": Pool(**decode)}, link=link or Link())


def requests_of(*rows: tuple[float, int, int]) -> list[Request]:
    return [
        Request(id=number, arrival_s=at, prompt_tokens=prompt, output_tokens=output)
        for number, (at, prompt, output) in enumerate(rows)
    ]


def run(requests: list[Request], cluster: Cluster, policy: object = None, **options: object) -> Result:
    """`simulate` with the laws of a run checked."""
    result = simulate(requests, policy=policy or fcfs(), latency=LATENCY, cluster=cluster, **options)
    check_result(result, cluster.hardware(LATENCY))
    return result


def test_a_transfer_takes_latency_and_bytes_over_bandwidth_and_decoding_starts_after_it():
    link = Link(latency_s=0.25, bytes_per_s=1e9)
    result = run(requests_of((0.0, 3000, 20)), pd(link))
    row = result.requests.iloc[0]
    prefilled_s = row.first_token_s - LATENCY.profile.request_s
    assert row.transfer_start_s == pytest.approx(prefilled_s)
    assert row.transfer_end_s - row.transfer_start_s == pytest.approx(3000 * TOKEN_BYTES / 1e9 + 0.25)
    assert row.tbt_max_s > row.transfer_end_s - row.first_token_s
    assert (row.prefill_instance, row.decode_instance, row.outcome) == (0, 1, "finished")


def test_a_faster_link_only_shortens_the_second_tokens_wait():
    waits_s = []
    for bytes_per_s in (1e9, 1e10, math.inf):
        row = run(requests_of((0.0, 3000, 20)), pd(Link(latency_s=0.0, bytes_per_s=bytes_per_s))).requests.iloc[0]
        waits_s.append((row.first_token_s, row.finish_s))
    first_s, finish_s = zip(*waits_s, strict=True)
    assert len(set(first_s)) == 1
    sent_bytes = 3000 * TOKEN_BYTES
    assert finish_s[0] - finish_s[2] == pytest.approx(sent_bytes / 1e9)
    assert finish_s[1] - finish_s[2] == pytest.approx(sent_bytes / 1e10)


def test_transfers_queue_for_a_link_in_the_order_of_their_prefills():
    result = run(requests_of(*[(0.0, 1000, 5)] * 4), pd(Link(latency_s=0.0, bytes_per_s=1e8)))
    table = result.requests
    took_s = 1000 * TOKEN_BYTES / 1e8
    assert np.diff(table.transfer_start_s) == pytest.approx([took_s] * 3)
    assert (table.transfer_start_s[1:].to_numpy() == table.transfer_end_s[:-1].to_numpy()).all()


def test_what_is_prefilled_for_one_token_is_not_moved():
    result = run(requests_of((0.0, 1000, 1), (0.1, 1000, 2)), pd())
    assert result.requests.transfer_start_s.isna().tolist() == [True, False]
    assert result.requests.decode_instance.isna().tolist() == [True, False]


def test_prefill_blocks_are_kept_until_the_transfer_ends_so_that_a_slow_link_holds_up_prefills():
    requests = requests_of(*[(0.0, 1000, 5)] * 6)
    small = Pool(decode="decode", kv_blocks=70)  # room for one prompt of 63 blocks
    slow = Link(latency_s=1.0, bytes_per_s=math.inf)
    held = run(requests, pd(slow, small))
    free = run(requests, pd(slow))
    assert np.diff(held.requests.start_s).min() > 1.0 > np.diff(free.requests.start_s).max()


def test_a_prefill_waits_in_its_own_memory_while_the_decode_side_has_no_room():
    requests = requests_of(*[(0.0, 1000, 200)] * 4)
    result = run(requests, pd(kv_blocks=100))  # room for one prompt and its answer at a time
    table = result.requests
    waited_s = table.transfer_start_s - (table.first_token_s - LATENCY.profile.request_s)
    assert waited_s[0] == pytest.approx(0.0)
    assert (waited_s[1:] > 1.0).all()
    assert (table.transfer_start_s[1:].to_numpy() >= table.finish_s[:-1].to_numpy() - 0.01).all()


def test_a_request_that_the_decode_side_could_never_hold_is_rejected_on_arrival():
    result = run(requests_of((0.0, 1000, 601), (0.1, 1000, 602), (0.2, 100, 5)), pd(kv_blocks=100))
    assert result.tables["requests"]["reason"].tolist() == [None, "too_large", None]
    assert result.requests.outcome.tolist() == ["finished", "rejected", "finished"]


def test_a_decode_pool_out_of_blocks_recomputes_there_and_counts_it():
    requests = requests_of(*[(0.0, 320, 400)] * 6)
    result = run(requests, pd(kv_blocks=130))
    table = result.requests
    assert (table.outcome == "finished").all()
    assert table.evictions.sum() > 0
    assert (table.recomputed_tokens[table.evictions > 0] >= 320).all()


def test_decode_instances_get_the_requests_that_they_have_fewest_of():
    requests = requests_of(*[(0.3 * number, 500, 300) for number in range(12)])
    table = run(requests, pd(instances=3)).requests
    assert sorted(table.decode_instance.value_counts()) == [4, 4, 4]


def test_the_prefill_side_of_pd_is_prefill_only_where_the_decode_side_never_holds_it_up():
    rng = np.random.default_rng(3)
    rows = [
        (at, 1 + int(length), 1 + int(out))
        for at, length, out in zip(
            np.cumsum(rng.exponential(0.2, 300)), rng.lognormal(6, 1, 300), rng.geometric(0.02, 300), strict=True
        )
    ]
    requests = requests_of(*rows)
    policy = ComposedPolicy("slack_edf", SLOAware(), "operator")
    alone = simulate(requests, policy=policy, latency=LATENCY, cluster=Pool(instances=2)).requests
    both = run(requests, pd(Link(latency_s=0.0, bytes_per_s=math.inf), Pool(instances=2, decode="decode")), policy)
    for column in ("start_s", "first_token_s", "prefill_instance", "preemptions"):
        assert both.requests[column].tolist() == alone[column].tolist(), column


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Small clusters: one to three instances a pool, tight or ample KV, a fast or slow link."""
    prefill = Pool(
        instances=draw(st.integers(1, 3)), decode="decode", kv_blocks=draw(st.sampled_from([80, 400, None])),
        policy=draw(st.sampled_from([None, fcfs(), HybridChunked(tokens=300, chunk=100)])),
    )  # fmt: skip
    return pd(
        Link(latency_s=draw(st.sampled_from([0.0, 0.3])), bytes_per_s=draw(st.sampled_from([2e8, 25e9, math.inf]))),
        prefill,
        instances=draw(st.integers(1, 3)),
        kv_blocks=draw(st.sampled_from([90, 300, None])),
        max_sequences=draw(st.sampled_from([None, 1, 3])),
        tp=draw(st.sampled_from([1, 2])),
    )


@settings(max_examples=60, deadline=None)
@given(
    cluster=clusters(),
    rows=st.lists(
        st.tuples(
            st.floats(0.0, 0.6).map(lambda gap: 0.0 if gap < 0.2 else gap), st.integers(1, 900), st.integers(1, 60)
        ),
        max_size=25,
    ),
    preemptive=st.booleans(),
)
def test_any_small_disaggregated_cluster_keeps_the_laws_and_finishes_what_it_accepts(cluster, rows, preemptive):
    arrivals = np.cumsum([row[0] for row in rows])
    requests = requests_of(*[(float(at), row[1], row[2]) for at, row in zip(arrivals, rows, strict=True)])
    policy = ComposedPolicy("slack_edf", SLOAware(), "layer") if preemptive else fcfs()
    result = run(requests, cluster, policy, router=RoundRobin())
    assert set(result.requests.outcome) <= {"finished", "rejected"}
    assert run(requests, cluster, policy, router=RoundRobin()).requests.equals(result.requests)


def test_a_policy_that_prefills_what_another_pool_has_prefilled_is_told_to_decode_it():
    wrong = ComposedPolicy("slack_edf", SLOAware(), "pass")
    with pytest.raises(PolicyError, match=r"prefills request 0, which was prefilled elsewhere. Allowed: to decode it"):
        run(requests_of((0.0, 100, 5)), pd(policy=wrong))


def test_a_horizon_counts_what_is_on_its_way_as_unfinished():
    requests = requests_of(*[(0.05 * number, 800, 300) for number in range(30)])
    for horizon_s in (0.2, 0.7, 1.5):
        result = run(requests, pd(Link(latency_s=0.3, bytes_per_s=1e9)), horizon_s=horizon_s)
        assert len(result.requests) == sum(request.arrival_s <= horizon_s for request in requests)
        assert set(result.requests.outcome) <= {"finished", "unfinished"}


def test_a_disaggregated_result_reads_back_as_it_was_written(tmp_path):
    result = run(requests_of((0.0, 500, 20), (0.1, 700, 30)), pd())
    result.save(tmp_path)
    again = Result.load(tmp_path)
    check_result(again, pd().hardware(LATENCY))
    assert again.requests.equals(result.requests)
    assert again.tables["transfers"]["end_s"].tolist() == result.tables["transfers"]["end_s"].tolist()


def test_the_shipped_pd_cluster_decodes_where_it_says():
    setup = build(compose(["cluster=pd", "workload=azure_conv", "workload.num_requests=60", "workload.rate_rps=3"]))
    result = setup.run()
    check_result(result, setup.cluster.hardware(setup.latency))
    assert list(result.run["pools"]) == ["prefill", "decode"]
    assert result.summary()["decode"]["output_tokens"] == result.requests.output_tokens.sum()


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Cluster(pools={"a": Pool(decode="b")}), "unknown cluster.pools.a.decode 'b'"),
        (lambda: Cluster(pools={"a": Pool(decode="a")}), "unknown cluster.pools.a.decode 'a'"),
        (lambda: Cluster(pools={"a": Pool(decode="b"), "b": Pool(decode="here")}), "leave its own `decode` null"),
        (lambda: Link(bytes_per_s=0.0), "cluster.link.bytes_per_s is 0.0; it must be above 0"),
        (lambda: Link(latency_s=-1.0), "cluster.link.latency_s is -1.0"),
    ],
)
def test_a_cluster_that_cannot_be_says_why(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()
