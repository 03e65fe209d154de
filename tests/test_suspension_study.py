"""When a bound on suspension repairs the mean TTFT: what the study's policy does, and what theory says of its second
table."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from toys import checked, toy_latency

from experiments.suspension import HeldWhileDecoding, four_users
from flowsim import Alone, ComposedPolicy, Request
from flowsim.config import build, compose
from flowsim.hybrid import InteractiveLIFO
from flowsim.sim import simulate

ENGINE = ["policy=vllm", "cluster=colocated", "cluster.async_steps=0"]


def run(policy=None, requests=60):
    setup = build(compose(ENGINE), {"workload": four_users(num_requests=requests, seed=3)})
    cluster = {"cluster": setup.cluster, "latency": setup.latency}
    return simulate(setup.requests, policy=policy or setup.policy, **cluster)


def test_a_prefill_that_is_never_held_back_makes_vllms_schedule():
    own, vllm = run(HeldWhileDecoding(5, math.inf)).requests, run().requests
    assert own.ttft_s.tolist() == vllm.ttft_s.tolist()
    assert own.finish_s.tolist() == vllm.finish_s.tolist()


def chunks(result):
    """(request, seconds between the end of a chunk and the begin of its next one, longest step) of one run."""
    segments = result.segments.set_index("batch")
    for request, rows in result.batches[result.batches.tokens > 1].groupby("request"):
        of = segments.loc[rows.batch].sort_values("start_s")
        for before_s, after_s in zip(of.end_s[:-1], of.start_s[1:], strict=True):
            yield request, after_s - before_s


def test_a_bound_ends_each_hold_after_its_time_and_without_one_holds_last_as_long_as_others_decode():
    longest_step_s = 0.2
    holds = {}
    for limit_s in (math.inf, 0.25, 0.05):
        result = run(HeldWhileDecoding(3, limit_s))
        holds[limit_s] = np.array([gap_s for _, gap_s in chunks(result)])
        assert holds[limit_s].max() <= limit_s + longest_step_s
    assert holds[0.05].max() >= 0.05
    assert holds[math.inf].max() > 1.0
    assert holds[math.inf].mean() > 2.0 * holds[0.05].mean()


def test_holding_back_raises_ttft_and_lowers_tbt_and_a_bound_lies_between():
    free, bounded, unbounded = (
        run(policy, 200).summary() for policy in (None, HeldWhileDecoding(3, 0.05), HeldWhileDecoding(3, math.inf))
    )
    assert 2.0 * free["ttft_s"]["mean"] < unbounded["ttft_s"]["mean"]
    assert free["ttft_s"]["mean"] < bounded["ttft_s"]["mean"] < 0.6 * unbounded["ttft_s"]["mean"]
    assert unbounded["tbt_mean_s"]["mean"] < bounded["tbt_mean_s"]["mean"] < free["tbt_mean_s"]["mean"]


@pytest.mark.parametrize(
    ("max_suspend_s", "mean"),
    [(math.inf, lambda load: 1.0 / (1.0 - load)), (0.0, lambda load: (2.0 - load) / (2.0 * (1.0 - load)))],
    ids=["preemptive LIFO", "first come first served"],
)
def test_newest_first_has_the_mean_of_preemptive_lifo_and_with_a_bound_of_nothing_that_of_fcfs(max_suspend_s, mean):
    """M/D/1 (Kleinrock, vol. 1): S / (1 - load) for preemptive LIFO, whatever the times of service, and
    S (2 - load) / (2 (1 - load)) for FCFS."""
    load, means_s = 0.7, []
    for seed in range(12):
        gaps_s = np.random.default_rng(seed).exponential(1.0 / load, 3000)
        requests = [
            Request(id=place, arrival_s=at, prompt_tokens=1000) for place, at in enumerate(np.cumsum(gaps_s).tolist())
        ]
        policy = ComposedPolicy(InteractiveLIFO(math.inf), Alone(), "operator", max_suspend_s=max_suspend_s)
        result = checked(requests, policy, toy_latency(0.001, layers=200), kv_blocks=10**9, max_batches=10**6)
        means_s.append(float(result.requests.ttft_s.mean()))
    half = stats.t.ppf(0.999, len(means_s) - 1) * np.std(means_s, ddof=1) / math.sqrt(len(means_s))
    assert np.mean(means_s) == pytest.approx(mean(load), abs=half + 0.01)
