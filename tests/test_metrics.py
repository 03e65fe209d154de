"""Figures of a run, by definition: attainment, rates, load, and what has nothing to be computed from."""

from __future__ import annotations

import pytest
from toys import checked, toy_latency, workload

from flowsim import Alone, ComposedPolicy, Request


def fcfs(**options):
    return ComposedPolicy("arrival", Alone(), "request", **options)


def test_a_ttft_equal_to_its_slo_meets_it():
    # 10 tokens take 10 s: the first is exactly on time, the second, which starts at 10, a hair late
    result = checked(workload((0.0, 10, 10.0), (0.0, 10, 19.999)), fcfs(), toy_latency())
    assert result.requests.met_slo.tolist() == [True, False]
    assert result.summary()["attainment"] == 0.5


def test_refused_requests_count_as_missed_and_requests_without_an_slo_do_not_count():
    # edge case: 10 requests with an SLO, 4 refused, 6 met, and 5 without an SLO
    rows = [(float(100 * at), 10, 10.0) for at in range(6)] + [(600.0, 900, 10.0)] * 4 + [(600.0, 10)] * 5
    result = checked(workload(*rows), fcfs(), toy_latency(), kv_blocks=10)
    figures = result.summary()
    assert figures["attainment"] == pytest.approx(0.6)
    assert figures["rejected"] == figures["rejected_by_reason"]["too_large"] == 4
    assert result.requests.met_slo.isna().sum() == 5


def test_rate_and_offered_load_are_of_the_arrivals_and_isolated_gpu_seconds():
    latency = toy_latency(request_s=3.0)
    result = checked(workload((0.0, 10), (40.0, 20), (80.0, 30)), fcfs(), latency)
    figures = result.summary()
    assert figures["rate_rps"] == pytest.approx(2 / 80)
    assert figures["offered_load"] == pytest.approx(2 / 80 * 20)  # request_s holds no GPU
    assert figures["utilisation"] == pytest.approx(60 / 113)  # until the last first token
    assert result.requests.ttft_s.tolist() == pytest.approx([13.0, 23.0, 33.0])


def test_impossible_counts_slos_under_the_isolated_ttft():
    result = checked(workload((0.0, 10, 9.0), (50.0, 10, 10.0)), fcfs(), toy_latency())
    assert result.summary()["impossible"] == 1


def test_a_class_has_its_own_figures():
    requests = [
        Request(id=0, arrival_s=0.0, prompt_tokens=10, ttft_slo_s=20.0, slo_class="chat"),
        Request(id=1, arrival_s=0.0, prompt_tokens=30, ttft_slo_s=20.0, slo_class="file"),
    ]
    figures = checked(requests, fcfs(), toy_latency()).summary()
    assert figures["attainment_by_class"] == {"chat": 1.0, "file": 0.0}
    assert figures["ttft_s_by_class"]["file"]["mean"] == pytest.approx(40.0)
    assert figures["longest_wait_s_by_class"] == {"chat": 0.0, "file": pytest.approx(10.0)}


def test_figures_without_anything_to_compute_them_from_are_none_under_the_same_keys():
    full = checked(workload((0.0, 10, 20.0), (1.0, 10, 20.0)), fcfs(), toy_latency()).summary()
    empty = checked(workload((0.0, 900, 1.0)), fcfs(), toy_latency(), kv_blocks=1).summary()
    assert set(empty) == set(full)
    assert empty["ttft_s"]["p99"] is None
    assert empty["rate_rps"] is empty["offered_load"] is None
    assert empty["attainment"] == 0.0
    assert empty["utilisation"] == 0.0
    none = checked(workload((0.0, 10)), fcfs(), toy_latency()).summary()
    assert none["attainment"] is None
