"""Every shipped policy's law in an example worked out by hand, and laws that hold for all of them.

Policies are built from `conf/policy/*.yaml`, so the files are tested too. On the toy hardware n tokens take n
seconds (n ms where `MS` is passed) in two layers of five equal operators.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random

import numpy as np
import pytest
from toys import checked, toy_latency, workload

from flowsim import Alone, ComposedPolicy, LatencyModel, Policy, Request, Result, View, load_profile
from flowsim.config import CONF, compose, make
from flowsim.core import Job
from flowsim.testing import make_job, make_view

SHIPPED = sorted(path.stem for path in (CONF / "policy").glob("*.yaml"))
SECOND = toy_latency(1.0)
MS = toy_latency(0.001)
EXACT = toy_latency(10.0)  # a token takes 10 s: every time below is a whole number, so ties are ties
SLO_AWARE = ("block_sedf", "edf", "flowprefill", "layer_sedf", "pass_sedf", "polling", "request_sedf")
ONE_BY_ONE = {"block_tokens": 1}


@functools.cache
def shipped(name: str, *overrides: str) -> Policy:
    return make(compose([f"policy={name}", *(f"policy.{override}" for override in overrides)]), "policy")


def ran(result: Result) -> list[tuple[list[int], float, float]]:
    """(requests of the batch, start_s, end_s) of each segment."""
    members: dict[int, list[int]] = {}
    for row in result.batches.itertuples():
        members.setdefault(row.batch, []).append(row.request)
    return [(members[row.batch], round(row.start_s, 6), round(row.end_s, 6)) for row in result.segments.itertuples()]


def passes(result: Result) -> list[tuple[list[tuple[int, int]], float]]:
    """([(request, tokens), ...], end_s) of each batch of a chunked policy."""
    members: dict[int, list[tuple[int, int]]] = {}
    for row in result.batches.itertuples():
        members.setdefault(row.batch, []).append((row.request, row.tokens))
    return [(members[row.batch], round(row.end_s, 6)) for row in result.segments.itertuples()]


def flags(result: Result) -> list[tuple[float, float, int, int, bool]]:
    """(flagged_s, stopped_s, victim, by, paused) of each preemption."""
    columns = ["flagged_s", "stopped_s", "victim", "by", "paused"]
    return [(round(a, 6), round(b, 6), *rest) for a, b, *rest in result.preemptions[columns].to_numpy().tolist()]


def patient(requests: list[Request], abandon_s: dict[int, float]) -> list[Request]:
    """The same requests, some with clients that give up."""
    return [dataclasses.replace(one, abandon_s=abandon_s.get(one.id, math.inf)) for one in requests]


# ---------------------------------------------------------------- first come, first served


def test_fcfs_runs_requests_alone_in_the_order_of_arrival_and_stops_none():
    # The second has the tightest deadline (due 16), the third the next; both wait for the first one's 100 s.
    result = checked(workload((0.0, 100), (1.0, 10, 15.0), (2.0, 5, 200.0)), shipped("fcfs"), SECOND)
    assert ran(result) == [([0], 0.0, 100.0), ([1], 100.0, 110.0), ([2], 110.0, 115.0)]
    assert flags(result) == []


def test_chunked_2k_fills_passes_of_2048_tokens_in_the_order_of_arrival():
    # Pass 1: 2048 of the first prompt. Pass 2: its other 952, all 1000 of the second, and 96 that are left of
    # the budget for the third. Pass 3: the third's other 404.
    result = checked(workload((0.0, 3000), (0.0, 1000), (1.0, 500, 0.6)), shipped("chunked_2k"), MS)
    assert passes(result) == [([(0, 2048)], 2.048), ([(0, 952), (1, 1000), (2, 96)], 4.096), ([(2, 404)], 4.5)]
    assert result.requests.ttft_s.tolist() == pytest.approx([4.096, 4.096, 3.5])


def test_chunked_8k_fills_passes_of_8192_tokens_in_the_order_of_arrival():
    # Pass 1: 8192 of the first prompt. Pass 2: its other 1808, and the two short ones whole: 3308 tokens.
    result = checked(workload((0.0, 10000), (0.0, 1000), (1.0, 500, 0.6)), shipped("chunked_8k"), MS)
    assert passes(result) == [([(0, 8192)], 8.192), ([(0, 1808), (1, 1000), (2, 500)], 11.5)]


def test_hybrid_chunked_gives_each_prompt_a_chunk_a_step_interactive_ones_first():
    # Step 1: 512 of the first prompt, alone. From then on the interactive one (SLO 0.6 s), which came last, is before
    # both; it, the first and the third get 512 each, and the 500 that the third has left go beside 512 of the first.
    result = checked(workload((0.0, 1600), (0.1, 700), (0.2, 600, 0.6)), shipped("hybrid_chunked"), MS)
    assert passes(result) == [
        ([(0, 512)], 0.512),
        ([(2, 512), (0, 512), (1, 512)], 2.048),
        ([(2, 88), (0, 512), (1, 188)], 2.836),
        ([(0, 64)], 2.9),
    ]


def test_hybrid_chunked_fills_its_budget_in_order_and_the_last_prompt_gets_what_is_left():
    policy = shipped("hybrid_chunked", "tokens=10", "chunk=4", "order=arrival")
    result = checked(workload((0.0, 9), (0.0, 3), (0.0, 8)), policy, SECOND)
    assert passes(result) == [
        ([(0, 4), (1, 3), (2, 3)], 10.0),
        ([(0, 4), (2, 4)], 18.0),
        ([(0, 1), (2, 1)], 20.0),
    ]


def test_vllm_serves_decodes_then_started_prompts_then_new_ones_unless_a_sequence_has_lost_its_blocks():
    policy = shipped("vllm", "batching.tokens=10")
    started, new, decoding = make_job(1, 9, done_tokens=4), make_job(2, 8), make_job(0, 5, done_tokens=5)
    view = make_view(waiting=[started, new])
    view.decodes[decoding.id] = decoding
    batch = policy.select(view)
    assert (batch.decodes, batch.parts) == ((decoding,), ((started, 5), (new, 4)))
    view.evicted = True
    batch = policy.select(view)
    assert (batch.decodes, batch.parts) == ((decoding,), ((started, 5),))


def test_vllm_is_chunked_prefill_where_nothing_decodes():
    requests = workload((0.0, 5000), (0.0, 300), (0.1, 2500))
    assert passes(checked(requests, shipped("vllm"), MS)) == passes(checked(requests, shipped("chunked_2k"), MS))


def test_interactive_lifo_starves_the_oldest_and_interactive_first_does_not():
    # Ten tokens a step; every 9 s an interactive prompt of 10: under LIFO the newest of those that wait goes first.
    requests = workload((0.0, 10, 0.5), *[(9.0 * place, 10, 0.5) for place in range(1, 40)])
    waits_s = {}
    for order in ("interactive_first", "interactive_lifo"):
        policy = shipped("hybrid_chunked", "tokens=10", "chunk=null", f"order={order}")
        waits_s[order] = checked(requests, policy, SECOND).requests.ttft_s
    assert waits_s["interactive_first"].is_monotonic_increasing
    assert waits_s["interactive_lifo"].max() > 2 * waits_s["interactive_first"].max()


def test_ageing_lets_a_long_prompt_through_a_stream_of_interactive_ones():
    requests = workload((0.0, 30, 900.0), *[(9.5 * place, 10, 0.5) for place in range(60)])
    ttft_s = []
    for age_s in ("inf", "50"):
        policy = shipped("hybrid_chunked", "tokens=10", "chunk=10", f"age_s={age_s}", "aged_share=0.5")
        ttft_s.append(checked(requests, policy, SECOND).requests.ttft_s[0])
    assert ttft_s[0] > 500.0
    assert 50.0 < ttft_s[1] <= 50.0 + 10.0 + 60.0


# 5000 tokens due 100; 3000 tokens at 1 s due 3: hopeless on arrival; 1000 tokens at 1.5 s due 11.5
CHUNKED = ((0.0, 5000, 100.0), (1.0, 3000, 2.0), (1.5, 1000, 10.0))


def test_chunked_edf_gives_each_pass_to_the_earliest_deadlines_met_or_not():
    # No arrival stops the first pass. At 2.048 the order is 1 (due 3, too late already), 2 (due 11.5), 0: request
    # 1 gets a whole pass, then its last 952, all of 2 and 96 of 0; request 0 has 2856 left for two more.
    result = checked(workload(*CHUNKED), shipped("chunked_edf"), MS)
    assert passes(result) == [
        ([(0, 2048)], 2.048),
        ([(1, 2048)], 4.096),
        ([(1, 952), (2, 1000), (0, 96)], 6.144),
        ([(0, 2048)], 8.192),
        ([(0, 808)], 9.0),
    ]
    assert flags(result) == []


def test_chunked_sedf_gives_each_pass_to_the_earliest_deadline_that_can_be_met():
    # At 2.048 the order is 2 (due 11.5), 0 (due 100), and 1 last: it would need until 5.048 and is due at 3.
    # Request 0 gets 1048 beside 2, then its last 1904; 1 gets the 144 left over, and two more passes.
    result = checked(workload(*CHUNKED), shipped("chunked_sedf"), MS)
    assert passes(result) == [
        ([(0, 2048)], 2.048),
        ([(2, 1000), (0, 1048)], 4.096),
        ([(0, 1904), (1, 144)], 6.144),
        ([(1, 2048)], 8.192),
        ([(1, 808)], 9.0),
    ]
    assert flags(result) == []


# ---------------------------------------------------------------- FlowPrefill and where it may stop

# A prompt of 100 s runs as passes of 40, 40 and 20 s. In the first, operators end every 4 s, blocks at 12, 20, 32
# and 40, layers at 20 and 40. Two short prompts come at 1 and 2 s, due at 201 and 302; the long one is due at 500.
GRANULARITY = ((0.0, 100, 500.0), (1.0, 5, 200.0), (2.0, 3, 300.0))


def _pauses_at(name: str, stop_s: float) -> None:
    """The long prompt pauses there, both short ones run as one batch of 8 s, the long one goes on."""
    result = checked(workload(*GRANULARITY), shipped(name), SECOND, pass_tokens=40)
    assert ran(result) == [([0], 0.0, stop_s), ([1, 2], stop_s, stop_s + 8.0), ([0], stop_s + 8.0, 108.0)]
    assert flags(result) == [(1.0, stop_s, 0, 1, True)]
    assert result.requests.blocked_s.tolist() == pytest.approx([0.0, stop_s - 1.0, 0.0])
    assert result.requests.suspended_s.tolist() == pytest.approx([8.0, 0.0, 0.0])


def test_flowprefill_pauses_a_long_prompt_at_the_next_operator_and_batches_the_short_ones():
    _pauses_at("flowprefill", 4.0)


def test_block_sedf_pauses_a_long_prompt_after_the_next_attention_or_mlp_block():
    _pauses_at("block_sedf", 12.0)


def test_layer_sedf_pauses_a_long_prompt_at_the_end_of_the_next_layer():
    _pauses_at("layer_sedf", 20.0)


def test_pass_sedf_pauses_a_long_prompt_between_two_passes():
    _pauses_at("pass_sedf", 40.0)


def test_request_sedf_lets_a_long_prompt_end_and_then_batches_the_short_ones():
    result = checked(workload(*GRANULARITY), shipped("request_sedf"), SECOND, pass_tokens=40)
    assert ran(result) == [([0], 0.0, 100.0), ([1, 2], 100.0, 108.0)]
    assert flags(result) == [(1.0, 100.0, 0, 1, False)]


def test_no_batching_pauses_at_the_next_operator_and_runs_the_short_ones_one_by_one():
    # One pass here: operators of 10 s. At 15 the second short one (due 302) is before the long one (due 500).
    result = checked(workload(*GRANULARITY), shipped("no_batching"), SECOND)
    assert ran(result) == [([0], 0.0, 10.0), ([1], 10.0, 15.0), ([2], 15.0, 18.0), ([0], 18.0, 108.0)]


# due at 500, 101, 202, and 7: the last is hopeless at the stop at 10 s
LATE = ((0.0, 100, 500.0), (1.0, 30, 100.0), (2.0, 20, 200.0), (3.0, 5, 4.0))


def test_edf_runs_the_earliest_deadline_even_if_it_is_lost_and_batches_the_rest():
    # At 10 request 3 is first, and alone: its SLO is used up. At 15 request 1 has 86 s left and needs 50 with 2.
    result = checked(workload(*LATE), shipped("edf"), SECOND)
    assert ran(result) == [([0], 0.0, 10.0), ([3], 10.0, 15.0), ([1, 2], 15.0, 65.0), ([0], 65.0, 155.0)]


def test_flowprefill_puts_a_lost_deadline_last_where_it_may_still_join_a_batch():
    # At 10 request 1 leads with 91 s left; 2 joins (50 s), then the lost 3 (55 s). Members' own SLOs do not count.
    result = checked(workload(*LATE), shipped("flowprefill"), SECOND)
    assert ran(result) == [([0], 0.0, 10.0), ([1, 2, 3], 10.0, 65.0), ([0], 65.0, 155.0)]


def test_shortest_runs_the_fewest_seconds_left_alone_and_may_stop_at_each_operator():
    # At 23 request 0 has 77 s left and 1 needs 60: 0 pauses at 30. At 40 request 1 has 50 s left and 2 needs 45:
    # 1 pauses at 42, between its operators of 6 s. At 87: 1 has 48 left, 0 has 70, 3 has 72.
    result = checked(workload((0.0, 100), (23.0, 60), (40.0, 45), (50.0, 72)), shipped("shortest"), SECOND)
    assert ran(result) == [
        ([0], 0.0, 30.0),
        ([1], 30.0, 42.0),
        ([2], 42.0, 87.0),
        ([1], 87.0, 135.0),
        ([0], 135.0, 205.0),
        ([3], 205.0, 277.0),
    ]
    assert flags(result) == [(23.0, 30.0, 0, 1, True), (40.0, 42.0, 1, 2, True)]


def test_the_answer_at_the_stop_is_what_runs():
    # At 23 the first has 77 s left, more than the second's 75, and is flagged; at its stop at 30 it has 70: it goes on.
    result = checked(workload((0.0, 100), (23.0, 75)), shipped("shortest"), SECOND)
    assert ran(result) == [([0], 0.0, 30.0), ([0], 30.0, 100.0), ([1], 100.0, 175.0)]
    assert flags(result) == [(23.0, 30.0, 0, 1, True)]


# ---------------------------------------------------------------- when a policy is asked


def test_polling_looks_at_arrivals_at_multiples_of_10_ms_and_decides_at_completions_at_once():
    # Request 0 comes at 3 ms and starts at 10; its operators take 99 ms: stops at 109, 208, 307, 406 and 505.
    # Request 1 comes at 303, is seen at 310, too late for the stop at 307. At 456, no multiple, 0 goes on at once.
    result = checked(workload((0.003, 990, 50.0), (0.303, 50, 0.5)), shipped("polling"), MS)
    assert ran(result) == [([0], 0.01, 0.406), ([1], 0.406, 0.456), ([0], 0.456, 1.05)]
    assert flags(result) == [(0.31, 0.406, 0, 1, True)]


def test_polling_batches_what_came_since_the_last_poll():
    result = checked(workload((0.011, 20), (0.012, 30), (0.021, 5)), shipped("polling"), MS)
    assert ran(result) == [([0, 1], 0.02, 0.07), ([2], 0.07, 0.075)]


def test_polling_an_arrival_at_a_multiple_of_the_period_starts_there():
    assert ran(checked(workload((0.02, 20)), shipped("polling"), MS)) == [([0], 0.02, 0.04)]


def test_polling_an_arrival_at_an_idle_instance_waits_for_the_next_multiple():
    result = checked(workload((0.003, 100), (1.003, 100)), shipped("polling"), MS)
    assert ran(result) == [([0], 0.01, 0.11), ([1], 1.01, 1.11)]


def test_asked_at_stops_nothing_blocks_and_the_switch_comes_at_the_next_legal_stop():
    # Nobody asks at 23. At 30, the end of an operator of 10 s (a layer: at 50), the urgent one is seen.
    for name, stop_s in [("flowprefill", 30.0), ("layer_sedf", 50.0)]:
        result = checked(workload((0.0, 100, 500.0), (23.0, 5, 60.0)), shipped(name, "consult=stops"), SECOND)
        assert ran(result) == [([0], 0.0, stop_s), ([1], stop_s, stop_s + 5.0), ([0], stop_s + 5.0, 105.0)]
        assert flags(result) == [(stop_s, stop_s, 0, 1, True)]
        assert result.requests.blocked_s.tolist() == [0.0, 0.0]
        assert result.requests.queued_s[1] == pytest.approx(stop_s - 23.0)
        assert result.summary()["preemptions"]["blocking_s"]["max"] == 0.0


def test_asked_at_stops_an_arrival_at_a_stop_is_seen_there():
    # An arrival without urgency at 25 changes nothing.
    requests = workload((0.0, 100, 500.0), (30.0, 5, 20.0))
    result = checked(requests, shipped("flowprefill", "consult=stops"), SECOND)
    assert ran(result) == [([0], 0.0, 30.0), ([1], 30.0, 35.0), ([0], 35.0, 105.0)]


def test_asked_at_stops_an_arrival_at_a_stop_is_seen_there_whatever_came_before():
    requests = workload((0.0, 100, 500.0), (25.0, 5, 900.0), (30.0, 5, 20.0))
    result = checked(requests, shipped("flowprefill", "consult=stops"), SECOND)
    assert ran(result)[:2] == [([0], 0.0, 30.0), ([2, 1], 30.0, 40.0)]


# ---------------------------------------------------------------- orders


def test_hopeless_requests_go_last_latest_deadline_first():
    # At 1 requests 1 (due 20) and 2 (due 30) need until 41: hopeless. Request 3 (due 500) is before 0 (due 1000).
    requests = workload((0.0, 50, 1000.0), (1.0, 40, 19.0), (1.0, 40, 29.0), (1.0, 5, 499.0))
    result = checked(requests, shipped("no_batching"), SECOND)
    assert ran(result) == [
        ([0], 0.0, 5.0),
        ([3], 5.0, 10.0),
        ([0], 10.0, 55.0),
        ([2], 55.0, 95.0),
        ([1], 95.0, 135.0),
    ]


def test_a_request_that_waits_becomes_hopeless_when_its_last_chance_passes():
    # Request 1 (due 60, 45 s) can be met until 15; the first one's 20 s cannot be stopped. At 20 it is lost.
    requests = workload((0.0, 20, 21.0), (1.0, 45, 59.0), (1.0, 5, 399.0))
    assert ran(checked(requests, shipped("request_sedf", "batching.tokens=1"), SECOND)) == [
        ([0], 0.0, 20.0),
        ([2], 20.0, 25.0),
        ([1], 25.0, 70.0),
    ]


def test_slack_zero_counts_as_hopeless():
    # Both need 10 s. Request 0 is due in exactly 10 s.
    result = checked(workload((0.0, 1, 10.0), (0.0, 1, 100.0)), shipped("no_batching"), EXACT)
    assert ran(result) == [([1], 0.0, 10.0), ([0], 10.0, 20.0)]


def test_requests_without_an_slo_go_after_deadlines_that_can_be_met_and_before_lost_ones():
    requests = workload((0.0, 10, 11.0), (1.0, 8), (2.0, 8, 2.0), (3.0, 8, 900.0))
    result = checked(requests, shipped("request_sedf", "batching.tokens=9"), SECOND)
    assert [members for members, *_ in ran(result)] == [[0], [3], [1], [2]]


def test_interactive_first_puts_slos_up_to_a_second_before_all_others_each_kind_as_it_came():
    # Request 1 (SLO 5 s) does not stop 0 (10 s), 2 (SLO 1 s) does, at 10; 3 (SLO 0.5 s) came after 2.
    requests = workload((0.0, 100, 10.0), (5.0, 20, 5.0), (6.0, 10, 1.0), (7.0, 10, 0.5))
    result = checked(requests, shipped("no_batching", "order=interactive_first"), SECOND)
    assert ran(result) == [
        ([0], 0.0, 10.0),
        ([2], 10.0, 20.0),
        ([3], 20.0, 30.0),
        ([0], 30.0, 120.0),
        ([1], 120.0, 140.0),
    ]
    assert flags(result) == [(6.0, 10.0, 0, 2, True)]


def test_ties_go_to_running_and_suspended_ones_before_waiting_ones_and_then_to_the_lower_id():
    # All are due at 100 but request 2 (due 57), which comes at 7 and stops request 0 at 10 (operators of 5 s).
    # At 1 request 1 does not stop 0. At 20 the suspended 0 is before 1 and 3.
    requests = workload((0.0, 5, 100.0), (1.0, 1, 99.0), (7.0, 1, 50.0), (12.0, 1, 88.0))
    result = checked(requests, shipped("edf", "batching.tokens=1"), EXACT)
    assert ran(result) == [
        ([0], 0.0, 10.0),
        ([2], 10.0, 20.0),
        ([0], 20.0, 60.0),
        ([1], 60.0, 70.0),
        ([3], 70.0, 80.0),
    ]
    assert flags(result) == [(7.0, 10.0, 0, 2, True)]


# ---------------------------------------------------------------- batchings


@functools.cache
def everyone(max_jobs: int) -> Policy:
    overrides = [
        "policy=fcfs",
        "policy.batching._target_=flowsim.batching.Everyone",
        f"+policy.batching.max_jobs={max_jobs}",
    ]
    return make(compose(overrides), "policy")


def test_everyone_runs_whole_prompts_together_up_to_max_jobs():
    result = checked(workload((0.0, 10), *[(1.0, 5)] * 4), everyone(3), SECOND)
    assert ran(result) == [([0], 0.0, 10.0), ([1, 2, 3], 10.0, 25.0), ([4], 25.0, 30.0)]


def test_everyone_ends_at_the_first_prompt_whose_blocks_do_not_fit():
    # 12 blocks of one token: 5 + 8 do not fit, and the 3 behind is not tried; then 8 + 3 do.
    result = checked(workload((0.0, 5), (0.0, 8), (0.0, 3)), everyone(8), SECOND, kv_blocks=12, **ONE_BY_ONE)
    assert ran(result) == [([0], 0.0, 5.0), ([1, 2], 5.0, 16.0)]


def test_a_chunk_bounds_what_one_prompt_gets_of_a_pass():
    # Budget 10, chunk 4. Pass 1: 4 + 3 + 3. Pass 2: 4 of the 5 and 4 of the 5 left. Pass 3: 1 + 1.
    policy = shipped("chunked_2k", "batching.tokens=10", "batching.chunk=4")
    result = checked(workload((0.0, 9), (0.0, 3), (0.0, 8)), policy, SECOND)
    assert passes(result) == [
        ([(0, 4), (1, 3), (2, 3)], 10.0),
        ([(0, 4), (2, 4)], 18.0),
        ([(0, 1), (2, 1)], 20.0),
    ]


def test_slo_aware_skips_what_is_too_large_and_walks_on():
    # Budget 20, deadlines in the order of ids. At 10: 8; 15 does not fit beside it; 7; 25 and 6 do not; 5 fills
    # it up to 20. Then 15 alone (6 would make 21), then 25 alone, then 6.
    tokens = (8, 15, 7, 25, 6, 5)
    requests = workload((0.0, 10, 50.0), *[(1.0, n, 100.0 + place) for place, n in enumerate(tokens)])
    result = checked(requests, shipped("request_sedf", "batching.tokens=20"), SECOND)
    assert ran(result) == [
        ([0], 0.0, 10.0),
        ([1, 3, 6], 10.0, 30.0),
        ([2], 30.0, 45.0),
        ([4], 45.0, 70.0),
        ([5], 70.0, 76.0),
    ]


@pytest.mark.parametrize("name", SLO_AWARE)
def test_slo_aware_ends_at_the_first_that_endangers_the_head(name):
    # At 10 request 1 (due 31) has 21 s left, and must keep 3. With 2 it would need 19: stop, although with 3 it
    # would need only 10. At 18 request 2 (due 40) has 22 s left, must keep 3.9, and needs 13 with 3.
    requests = workload((0.0, 10, 15.0), (1.0, 8, 30.0), (1.0, 11, 39.0), (1.0, 2, 49.0))
    result = checked(requests, shipped(name), SECOND)
    assert ran(result) == [([0], 0.0, 10.0), ([1], 10.0, 18.0), ([2, 3], 18.0, 31.0)]


def test_slo_aware_runs_a_head_alone_that_has_less_than_the_reserve_left():
    # At 10 request 1 (due 15) has 5 s left and with 2 needs 3: that leaves 2, at least a tenth of its SLO of 14
    # but not half of it.
    requests = workload((0.0, 10, 11.0), (1.0, 2, 14.0), (1.0, 1, 50.0))
    result = checked(requests, shipped("request_sedf"), SECOND)
    assert ran(result)[1:] == [([1, 2], 10.0, 13.0)]
    result = checked(requests, shipped("request_sedf", "batching.reserve=0.5"), SECOND)
    assert ran(result)[1:] == [([1], 10.0, 12.0), ([2], 12.0, 13.0)]


def test_slo_aware_skips_what_does_not_fit_into_kv_and_walks_on():
    # 30 blocks of one token: 8 + 15, not 10, but 5.
    requests = workload((0.0, 10, 50.0), *[(1.0, n, 100.0 + place) for place, n in enumerate((8, 15, 10, 5))])
    result = checked(requests, shipped("request_sedf"), SECOND, kv_blocks=30, **ONE_BY_ONE)
    assert ran(result) == [([0], 0.0, 10.0), ([1, 2, 4], 10.0, 38.0), ([3], 38.0, 48.0)]


@pytest.mark.parametrize(("lookahead", "batch"), [("0", [1]), ("2", [1, 3]), ("3", [1, 3, 4])])
def test_slo_aware_looks_at_so_many_waiting_jobs_behind_the_head_taken_or_not(lookahead, batch):
    # Budget 20: 8; 15 is too large; 7; 3.
    requests = workload((0.0, 10, 50.0), *[(1.0, n, 100.0 + place) for place, n in enumerate((8, 15, 7, 3))])
    policy = shipped("request_sedf", "batching.tokens=20", f"batching.lookahead={lookahead}")
    assert ran(checked(requests, policy, SECOND))[1][0] == batch


@pytest.mark.parametrize("name", SLO_AWARE)
def test_slo_aware_looks_64_jobs_ahead_and_to_the_letter_of_the_spec_at_all(name):
    requests = workload((0.0, 10, 50.0), *[(1.0, 1, 1e4)] * 71)
    assert [len(members) for members, *_ in ran(checked(requests, shipped(name), SECOND))] == [1, 65, 6]
    assert len(ran(checked(requests, shipped(name, "batching.lookahead=inf"), SECOND))[1][0]) == 71


@pytest.mark.parametrize("name", SLO_AWARE)
def test_a_batch_has_at_most_2048_tokens(name):
    # At 10 ms: 1000 and 1048 fill it; 1 more token is one too many.
    requests = workload((0.0, 10, 50.0), *[(0.001, n, 100.0 + place) for place, n in enumerate((1000, 1048, 1))])
    result = checked(requests, shipped(name), MS)
    assert ran(result) == [([0], 0.0, 0.01), ([1, 2], 0.01, 2.058), ([3], 2.058, 2.059)]


# ---------------------------------------------------------------- KV short


def test_where_the_head_does_not_fit_the_running_one_goes_on_and_smaller_ones_are_not_tried():
    # 100 blocks of one token; 80 are held. Request 1 (30 tokens, due 205) is first but does not fit; 2 would fit
    # and is before 0, but behind 1. At 80 both run: 1 has 125 s left and must keep 20.
    requests = workload((0.0, 80, 1000.0), (5.0, 30, 200.0), (6.0, 10, 200.0))
    result = checked(requests, shipped("flowprefill"), SECOND, kv_blocks=100, **ONE_BY_ONE)
    assert ran(result) == [([0], 0.0, 80.0), ([1, 2], 80.0, 120.0)]
    assert flags(result) == []


def test_where_the_head_does_not_fit_the_best_suspended_one_goes_on():
    # 0 (60 tokens) pauses at 6 for 1 (30). At 36 request 2 (50 tokens, due 307) is first, but 40 blocks are free;
    # 3 (5 tokens, due 408) is before the suspended 0 (due 1000) and would fit, but is not tried.
    requests = workload((0.0, 60, 1000.0), (5.0, 30, 290.0), (7.0, 50, 300.0), (8.0, 5, 400.0))
    result = checked(requests, shipped("flowprefill"), SECOND, kv_blocks=100, **ONE_BY_ONE)
    assert ran(result) == [([0], 0.0, 6.0), ([1], 6.0, 36.0), ([0], 36.0, 90.0), ([2, 3], 90.0, 145.0)]


def test_where_the_head_does_not_fit_a_chunked_prompt_that_holds_blocks_still_runs():
    # 20 blocks, budget 8. At 8 request 1 (10 tokens, due 101) is first but 8 blocks are free; 2 (3 tokens) would
    # fit, beside the 4 that 0 has left, but is not tried. Then 8 of 1; its last 2 beside all of 2.
    requests = workload((0.0, 12, 1000.0), (1.0, 10, 100.0), (2.0, 3, 200.0))
    policy = shipped("chunked_edf", "batching.tokens=8")
    result = checked(requests, policy, SECOND, kv_blocks=20, **ONE_BY_ONE)
    assert passes(result) == [([(0, 8)], 8.0), ([(0, 4)], 12.0), ([(1, 8)], 20.0), ([(1, 2), (2, 3)], 25.0)]


def test_no_free_batch_slot_is_treated_as_kv_short():
    # With 0 suspended at 10 and 1 running, request 2 (due 111) must wait for the end of 1 at 50.
    requests = workload((0.0, 100, 1000.0), (1.0, 40, 500.0), (11.0, 5, 100.0))
    result = checked(requests, shipped("flowprefill"), SECOND, max_batches=2)
    assert ran(result) == [([0], 0.0, 10.0), ([1], 10.0, 50.0), ([2], 50.0, 55.0), ([0], 55.0, 145.0)]


# ---------------------------------------------------------------- who is refused, who gives up


def test_hopeless_requests_may_be_refused_on_arrival_and_count_as_missed():
    # Alone and now: 0 needs exactly its 10 s, and makes it; 1 has half a second too little: refused; 2 makes it
    # from 10 to 30; 3 was admitted at 5 (10 s of 12), but the queue made it late.
    requests = workload((0.0, 1, 10.0), (0.0, 1, 9.5), (1.0, 2, 30.0), (5.0, 1, 12.0))
    result = checked(requests, shipped("request_sedf", "admit=hopeless"), EXACT)
    assert ran(result) == [([0], 0.0, 10.0), ([2], 10.0, 30.0), ([3], 30.0, 40.0)]
    assert result.requests.outcome.tolist() == ["finished", "rejected", "finished", "finished"]
    assert result.tables["requests"]["reason"].tolist() == [None, "admission", None, None]
    assert result.requests.met_slo.tolist() == [True, False, True, False]
    assert (result.summary()["rejected"], result.summary()["attainment"]) == (1, 0.5)


def at_most_20_tokens(_view: View, job: Job) -> bool:
    """An admission of a user's own."""
    return job.prompt_tokens <= 20


def test_an_admission_of_your_own_is_named_by_its_path_and_asked_once_for_each_request():
    requests = workload((0.0, 10, 50.0), (0.0, 21, 50.0), (1.0, 20, 50.0))
    result = checked(requests, shipped("fcfs", f"admit={__name__}.at_most_20_tokens"), SECOND)
    assert ran(result) == [([0], 0.0, 10.0), ([2], 10.0, 30.0)]
    assert result.tables["requests"]["reason"].tolist() == [None, "admission", None]
    assert result.summary()["attainment"] == pytest.approx(2 / 3)


def test_a_client_that_gives_up_is_gone_and_counted_as_missed_and_one_that_has_started_stays():
    # 1 came at 1 and gives up at 21; 0 would at 30, but has started.
    requests = patient(workload((0.0, 50, 100.0), (1.0, 10, 100.0), (2.0, 5, 100.0)), {0: 30.0, 1: 20.0})
    result = checked(requests, shipped("fcfs"), SECOND)
    assert ran(result) == [([0], 0.0, 50.0), ([2], 50.0, 55.0)]
    assert result.requests.outcome.tolist() == ["finished", "rejected", "finished"]
    assert result.tables["requests"]["reason"].tolist() == [None, "abandoned", None]
    assert result.requests.met_slo.tolist() == [True, False, True]
    assert (result.summary()["rejected"], result.summary()["attainment"]) == (1, pytest.approx(2 / 3))


def test_a_prompt_between_its_chunks_has_started_and_stays():
    # Budget 8: 8 of 0's 12 tokens are done at 8; then 1 (due 51) is first; at 10 the client of 0 would give up.
    requests = patient(workload((0.0, 12, 1000.0), (1.0, 8, 50.0)), {0: 10.0})
    result = checked(requests, shipped("chunked_edf", "batching.tokens=8"), SECOND)
    assert passes(result) == [([(0, 8)], 8.0), ([(1, 8)], 16.0), ([(0, 4)], 20.0)]


def test_a_paused_prompt_has_started_and_stays():
    requests = patient(workload((0.0, 100, 500.0), (23.0, 20, 60.0)), {0: 40.0})
    result = checked(requests, shipped("flowprefill"), SECOND)
    assert ran(result) == [([0], 0.0, 30.0), ([1], 30.0, 50.0), ([0], 50.0, 120.0)]


def test_those_behind_a_client_that_gave_up_start():
    # 100 blocks: 1 (30 tokens) is first, does not fit beside 0 (80), and gives up at 25. At 30 request 2 finds
    # nobody before it, and stops 0 at 32, between its operators of 8 s.
    requests = patient(workload((0.0, 80, 1000.0), (5.0, 30, 200.0), (30.0, 10, 300.0)), {1: 20.0})
    result = checked(requests, shipped("flowprefill"), SECOND, kv_blocks=100, **ONE_BY_ONE)
    assert ran(result) == [([0], 0.0, 32.0), ([2], 32.0, 42.0), ([0], 42.0, 90.0)]


def test_a_client_may_give_up_before_the_first_poll():
    requests = patient(workload((0.003, 100), (0.004, 50)), {0: 0.005})
    assert ran(checked(requests, shipped("polling"), MS)) == [([1], 0.01, 0.06)]


# ---------------------------------------------------------------- starvation


def test_a_batch_suspended_for_max_suspend_s_runs_first_at_the_next_decision_and_is_not_paused_again():
    # Urgent prompts of 10 s every 10 s from 5.5 on; the long one pauses at 10. Its 22 s are over at 32; the next
    # decision is the arrival at 35.5; the urgent one that runs pauses at 36, and the long one runs to its end.
    requests = workload((0.0, 100, 1e4), *[(5.5 + 10.0 * place, 10, 50.0) for place in range(12)])
    result = checked(requests, shipped("no_batching", "max_suspend_s=22"), SECOND)
    assert [row[1:] for row in ran(result) if row[0] == [0]] == [(0.0, 10.0), (36.0, 126.0)]
    assert result.requests.suspended_s[0] == pytest.approx(26.0)
    starved = checked(requests, shipped("no_batching"), SECOND)  # it waits for all twelve
    assert [row[1:] for row in ran(starved) if row[0] == [0]] == [(0.0, 10.0), (130.0, 220.0)]


def test_max_suspend_s_counts_all_pauses_of_a_batch_together():
    # Pauses from 10 to 20 and from 30 on: its 22 s are over at 42, the next decision is the arrival at 45.5, and
    # the urgent one that runs pauses at 46.
    requests = workload((0.0, 100, 1e4), *[(at, 10, 50.0) for at in (5.5, 25.5, 35.5, 45.5, 55.5)])
    result = checked(requests, shipped("no_batching", "max_suspend_s=22"), SECOND)
    assert [row[1:] for row in ran(result) if row[0] == [0]] == [(0.0, 10.0), (20.0, 30.0), (46.0, 126.0)]
    assert result.requests.suspended_s[0] == pytest.approx(26.0)


def test_of_two_batches_suspended_for_too_long_the_one_that_reached_the_limit_first_runs_first():
    # 0 pauses at 10 for 1 (due 301), which pauses at 16 for 2 (due 112). When 2 ends at 66, both have waited
    # for 20 s and more: 0 since 30, 1 since 36. Without the limit 1 would be next.
    requests = workload((0.0, 100, 1000.0), (1.0, 60, 300.0), (12.0, 50, 100.0))
    result = checked(requests, shipped("no_batching", "max_suspend_s=20"), SECOND)
    assert ran(result) == [
        ([0], 0.0, 10.0),
        ([1], 10.0, 16.0),
        ([2], 16.0, 66.0),
        ([0], 66.0, 156.0),
        ([1], 156.0, 210.0),
    ]
    assert [members for members, *_ in ran(checked(requests, shipped("no_batching"), SECOND))] == [
        [0],
        [1],
        [2],
        [1],
        [0],
    ]


def test_a_long_file_starves_under_steady_urgent_load_unless_its_suspension_is_bounded():
    # Edge case: text requests at 90 % load beside one 16k file request with an SLO of 6 s.
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    text_s = latency.isolated_s(200) - latency.profile.request_s
    gap_s = text_s / 0.9
    requests = workload((0.0, 16_000, 6.0), *[(0.01 + gap_s * place, 200, 0.25) for place in range(int(15 / gap_s))])
    starved = checked(requests, shipped("flowprefill"), latency).requests.iloc[0]
    assert starved.suspended_s > 8.0
    assert not starved.met_slo
    bounded = checked(requests, shipped("flowprefill", "max_suspend_s=2"), latency).requests.iloc[0]
    longest_s = max(
        np.diff(latency.bound(pass_tokens=8192, stops=shipped("flowprefill").stops).whole(200).passes[0].ends_s)
    )
    assert 2.0 <= bounded.suspended_s <= 2.0 + gap_s + longest_s + 1e-6
    assert bounded.met_slo


# ---------------------------------------------------------------- laws of every shipped policy


def busy(seed: int = 3, times: float = 1.0) -> list[Request]:
    """Forty requests, short ones and long ones of several passes, faster than they can be served."""
    rng = random.Random(seed)
    rows = []
    for place in range(40):
        tokens = rng.choice([rng.randint(20, 600), rng.randint(20, 600), rng.randint(2000, 12000)])
        rows.append((place * 0.9 + rng.random(), tokens, rng.choice([1.0, 4.0, 20.0, math.inf])))
    rows[0] = (0.0, 12_000, math.inf)  # and from then on the GPU is never idle
    return workload(*[(times * at, n, times * slo) for at, n, slo in rows])


@pytest.mark.parametrize("name", SHIPPED)
def test_twice_the_times_at_half_the_rate_double_every_ttft(name):
    overhead_s = {"pass_s": 0.004, "request_s": 0.002, "check_s": 0.0001, "switch_s": 0.0005}
    twice_s = {key: 2 * value for key, value in overhead_s.items()}
    twice = {"polling": ["consult.period_s=0.02"], "hybrid_chunked": ["interactive_s=2.0"]}
    twice["chunked_adaptive"] = twice["least_remaining_slack"] = ["batching.busy_s=0.2"]
    overrides = twice.get(name, [])
    single = checked(busy(), shipped(name), toy_latency(0.001, **overhead_s))
    double = checked(busy(times=2.0), shipped(name, *overrides), toy_latency(0.002, **twice_s))
    assert double.requests.ttft_s.to_numpy() == pytest.approx(2 * single.requests.ttft_s.to_numpy(), rel=1e-9)
    assert single.requests.queued_s.max() > 1.0


@pytest.mark.parametrize("name", SHIPPED)
def test_output_lengths_never_change_a_prefill_schedule(name):
    lengths = random.Random(5)
    requests = busy()
    longer = [dataclasses.replace(one, output_tokens=lengths.randint(1, 900)) for one in requests]
    short, long = checked(requests, shipped(name), MS), checked(longer, shipped(name), MS)
    for table in ("segments", "batches", "preemptions"):
        assert getattr(short, table).equals(getattr(long, table))
    assert short.requests.first_token_s.equals(long.requests.first_token_s)


# `polling` is left out: an arrival at an idle instance waits for the next poll, up to a period.
@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "polling"])
def test_without_contention_or_overheads_all_policies_agree(name):
    rng = random.Random(7)
    rows = [
        (3.0 * place + rng.random(), rng.randint(1, 2000), rng.choice([0.01, 1.0, math.inf])) for place in range(25)
    ]
    result = checked(workload(*rows), shipped(name), MS)
    assert result.requests.ttft_s.to_numpy() == pytest.approx([tokens * 0.001 for _, tokens, _ in rows])


# ---------------------------------------------------------------- beyond the paper; more in test_beyond.py


def test_layered_prefill_takes_whole_prompts_through_the_layers_a_group_a_pass_and_what_comes_later_waits():
    # 150 and 40 tokens take two groups, of a layer each; the two that have come meanwhile take one, of both layers.
    requests = workload((0.0, 150), (0.0, 40), (0.1, 60), (0.3, 30))
    result = checked(requests, shipped("layered_prefill", "batching.group_tokens=100"), MS)
    both = [(0, 150), (1, 40)]
    assert passes(result) == [(both, 0.095), (both, 0.19), ([(2, 60)], 0.25), ([(3, 30)], 0.33)]


def test_chunked_adaptive_fills_passes_of_100_ms_in_the_queues_order():
    # A token takes a millisecond: 100 of the first prompt, 100 more, its last 50 with 50 of the second, the other 30.
    result = checked(workload((0.0, 250), (0.0, 80)), shipped("chunked_adaptive"), MS)
    assert passes(result) == [([(0, 100)], 0.1), ([(0, 100)], 0.2), ([(0, 50), (1, 50)], 0.3), ([(1, 30)], 0.33)]


def test_slack_fraction_runs_the_least_share_of_an_slo_to_spare_first_and_the_least_overdue_of_the_late():
    # At 0 the first has 30 of 40 s to spare, the second, due later, 40 of 100; the third needs 50 s of its 20.
    # At 60 the first is late by 30 of its 40 s, the third by 90 of its 20.
    requests = workload((0.0, 10, 40.0), (0.0, 60, 100.0), (0.0, 50, 20.0))
    result = checked(requests, shipped("slack_fraction", "batching.lookahead=0"), SECOND)
    assert ran(result) == [([1], 0.0, 60.0), ([0], 60.0, 70.0), ([2], 70.0, 120.0)]


def test_least_remaining_slack_runs_the_most_overdue_share_of_an_slo_first():
    # At 0: none to lose, half of 20 s to spare, three quarters of 40 s, a tenth of 10 s short, a third of 3 s short.
    # At 4 request 3 is half of its SLO late. At 15 request 1 is a quarter of its SLO late, 2 has 15 of 40 s to spare.
    requests = workload((0.0, 10), (0.0, 10, 20.0), (0.0, 10, 40.0), (0.0, 11, 10.0), (0.0, 4, 3.0))
    order = shipped("least_remaining_slack").order
    result = checked(requests, ComposedPolicy(order, Alone(), "request"), SECOND)
    assert [members for members, *_ in ran(result)] == [[4], [3], [1], [2], [0]]


def test_graceful_gives_what_is_late_three_slos_and_it_competes_with_that():
    # The first cannot be on time: due again at 150, after the second and before the third.
    requests = workload((0.0, 100, 50.0), (0.0, 20, 140.0), (0.0, 20, 400.0))
    result = checked(requests, shipped("graceful", "batching.lookahead=0"), SECOND)
    assert ran(result) == [([1], 0.0, 20.0), ([0], 20.0, 120.0), ([2], 120.0, 140.0)]


def test_feasible_set_gives_up_the_longest_where_not_all_can_be_on_time():
    # By deadlines the first would end at 100 and the others be late; without it both are on time.
    requests = workload((0.0, 100, 110.0), (0.0, 30, 120.0), (0.0, 20, 125.0))
    result = checked(requests, shipped("feasible_set", "batching.lookahead=0"), SECOND)
    assert ran(result) == [([1], 0.0, 30.0), ([2], 30.0, 50.0), ([0], 50.0, 150.0)]


def test_adaptive_stops_weighs_the_checks_of_a_batch_against_the_waits_of_those_expected_to_come():
    # A check takes 0.1 s. Nothing has come before request 0, so one arrival is expected to go first: at its end (no
    # check) it would wait for 10 s on average, at layers 5 + 0.2, blocks 2.6 + 0.4, operators 1 + 1.0. Operators it is:
    # 2.1 s each. Request 1 (10 tokens) holds up the one suspended too: 5; 2.5 + 0.4; 1.3 + 0.8; 0.5 + 2.0. Blocks.
    requests = workload((0.0, 20, 200.0), (3.0, 10, 27.0))
    result = checked(requests, shipped("adaptive_stops"), toy_latency(1.0, check_s=0.1))
    assert result.tables["stops"]["stops"].tolist() == ["operator", "block"]
    assert ran(result) == [([0], 0.0, 4.2), ([1], 4.2, 14.6), ([0], 14.6, 31.4)]


def test_every_shipped_policy_has_a_law_in_this_file():
    assert [name for name in SHIPPED if not any(test.startswith(f"test_{name}_") for test in globals())] == []
