"""The executor, against a stepping reference, theory, hand-worked examples and laws."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import checked, operator_by_operator, toy_latency, workload

from flowsim import (
    Alone,
    ComposedPolicy,
    LatencyModel,
    PrefillOnly,
    SLOAware,
    Stops,
    TokenBudget,
    load_profile,
    simulate,
)
from flowsim.granularity import AdaptiveStops
from flowsim.workload import mixed


class EachItsOwn:
    """S-EDF whose batches take turns in having stops of each kind, and their policy's."""

    stops = Stops.LAYER

    def __init__(self):
        self.within = ComposedPolicy("slack_edf", SLOAware(300), "layer")

    def select(self, view):
        batch = self.within.select(view)
        if batch is not None and batch.number < 0:
            batch.stops = (*Stops, None)[batch.id % 6]
        return batch


POLICIES = {
    "fcfs": lambda: ComposedPolicy("arrival", Alone(), "request"),
    "chunked": lambda: ComposedPolicy("arrival", TokenBudget(200), "pass"),
    **{
        f"slack_edf_{stops.value}": lambda stops=stops: ComposedPolicy("slack_edf", SLOAware(300), stops)
        for stops in Stops
    },
    "adaptive": lambda: AdaptiveStops(ComposedPolicy("slack_edf", SLOAware(300), "pass")),
    "each_its_own": lambda: EachItsOwn(),
}

OVERHEADS = [{}, {"pass_s": 0.5, "request_s": 0.25, "check_s": 0.01, "switch_s": 0.125}]


@st.composite
def busy_workloads(draw: st.DrawFn) -> list:
    """Up to 25 requests, short and long, with tight and loose SLOs and some arriving at the same instant."""
    rows = draw(
        st.lists(
            st.tuples(
                st.floats(0.0, 40.0).map(lambda gap: 0.0 if gap < 4.0 else gap),
                st.integers(1, 900),
                st.sampled_from([10.0, 60.0, 300.0, math.inf]),
            ),
            min_size=1,
            max_size=25,
        )
    )
    arrivals = np.cumsum([row[0] * math.pi / 3 for row in rows])
    return workload(*[(float(at), row[1], row[2]) for at, row in zip(arrivals, rows, strict=True)])


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(
    requests=busy_workloads(),
    overheads=st.sampled_from(OVERHEADS),
    tail=st.booleans(),
    kv=st.sampled_from([60, 10**6]),
)
def test_skipping_and_stepping_operators_give_the_same_segments_and_first_tokens(name, requests, overheads, tail, kv):
    latency = toy_latency(0.1, quadratic_s=1e-5, tail=tail, **overheads)
    options = {"pass_tokens": 256, "kv_blocks": kv}
    result = checked(requests, POLICIES[name](), latency, **options)
    segments, first_token_s = operator_by_operator(requests, POLICIES[name](), latency, PrefillOnly(**options), kv)
    head = {row.batch: row.request for row in result.batches.itertuples() if row.position == 0}
    got = [(head[row.batch], row.start_s, row.end_s) for row in result.segments.itertuples()]
    assert [one[0] for one in got] == [one[0] for one in segments]
    assert np.allclose([one[1:] for one in got], [one[1:] for one in segments], rtol=0, atol=1e-9)
    finished = result.requests[result.requests.outcome == "finished"].set_index("id").first_token_s
    assert dict(finished) == pytest.approx(first_token_s, abs=1e-9)


@pytest.mark.parametrize("name", POLICIES)
def test_skipping_and_stepping_agree_on_the_real_profile(name):
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    requests = mixed(rate_rps=9.0, num_requests=150, seed=4)
    result = checked(requests, POLICIES[name](), latency, kv_blocks=4000)
    _, first_token_s = operator_by_operator(requests, POLICIES[name](), latency, PrefillOnly(), 4000)
    assert dict(result.requests.set_index("id").first_token_s) == pytest.approx(first_token_s, abs=1e-9)


def test_a_short_prompt_waits_for_one_operator_block_layer_pass_or_all_of_a_long_one():
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    timeline = latency.bound(pass_tokens=8192, stops=Stops.REQUEST).timeline([(16000, 0)])
    ends_s = timeline.passes[0].ends_s
    longest_s = {
        Stops.OPERATOR: max(b - a for a, b in zip((0.0, *ends_s), ends_s, strict=False)),
        Stops.BLOCK: max(ends_s[2], ends_s[4] - ends_s[2]),
        Stops.LAYER: ends_s[4],
        Stops.PASS: timeline.passes[0].total_s,
        Stops.REQUEST: timeline.total_s,
    }
    mean_wait_s = {}
    for stops, bound_s in longest_s.items():
        waits_s = []
        for arrival_s in np.linspace(0.1, 0.5, 15).tolist():
            requests = workload((0.0, 16000, 60.0), (arrival_s, 200, 5.0))
            result = checked(requests, ComposedPolicy("slack_edf", SLOAware(), stops), latency)
            short = result.requests.iloc[1]
            assert short.blocked_s <= bound_s + 5 * latency.profile.check_s
            waits_s.append(short.ttft_s - short.isolated_s)
        assert 0.0 < max(waits_s) <= bound_s + 5 * latency.profile.check_s + latency.profile.switch_s
        mean_wait_s[stops] = np.mean(waits_s)
    finest_first = list(longest_s)
    assert sorted(mean_wait_s, key=mean_wait_s.__getitem__) == finest_first


@pytest.mark.parametrize("name", POLICIES)
def test_without_contention_every_policy_gives_each_request_its_isolated_ttft(name):
    latency = toy_latency(0.01)
    requests = workload(*[(10.0 * number, 20 + 7 * number, 5.0) for number in range(20)])
    result = checked(requests, POLICIES[name](), latency)
    assert result.requests.ttft_s.to_numpy() == pytest.approx(0.01 * result.requests.prompt_tokens.to_numpy())


def test_a_long_prompt_is_paused_at_the_next_operator_and_resumed_there():
    # 100 tokens take 100 s in 10 operators of 10 s; the short one comes at 23 s and may start at 30 s.
    result = checked(workload((0.0, 100, 500.0), (23.0, 5, 20.0)), POLICIES["slack_edf_operator"](), toy_latency())
    rows = result.segments[["batch", "start_s", "end_s", "first_op", "last_op", "ended"]].to_numpy().tolist()
    assert rows == [
        [0, 0.0, 30.0, 0, 3, "paused"],
        [1, 30.0, 35.0, 0, 10, "finished"],
        [0, 35.0, 105.0, 3, 10, "finished"],
    ]
    long, short = result.requests.itertuples()
    assert (short.blocked_s, short.queued_s, short.ttft_s) == pytest.approx((7.0, 7.0, 12.0))
    assert (long.preemptions, long.suspended_s, long.ttft_s) == (1, pytest.approx(5.0), pytest.approx(105.0))


def test_a_switch_is_charged_to_a_new_batch_that_takes_over_and_not_to_a_resumed_one():
    latency = toy_latency(switch_s=2.0)
    result = checked(workload((0.0, 100, 500.0), (23.0, 5, 20.0)), POLICIES["slack_edf_operator"](), latency)
    assert result.segments.switch_s.tolist() == [0.0, 2.0, 0.0]
    assert result.segments.start_s.tolist() == pytest.approx([0.0, 32.0, 37.0])


def test_a_chunked_prompt_shares_passes_and_the_last_one_is_cut_to_fit():
    # edge case: budget 8 and prompts of 4 and 8 tokens: the first pass computes 4 + 4, the second 4
    result = checked(workload((0.0, 4), (0.0, 8)), ComposedPolicy("arrival", TokenBudget(8), "pass"), toy_latency())
    assert result.batches[["batch", "request", "tokens", "cached_tokens"]].to_numpy().tolist() == [
        [0, 0, 4, 0],
        [0, 1, 4, 0],
        [1, 1, 4, 4],
    ]
    assert result.requests.ttft_s.tolist() == pytest.approx([8.0, 12.0])
    assert result.segments.ended.tolist() == ["pass", "finished"]


def test_equal_arrivals_are_served_in_the_order_of_the_list():
    result = checked(workload(*[(0.0, 3)] * 5), POLICIES["fcfs"](), toy_latency())
    assert result.requests.ttft_s.tolist() == pytest.approx([3.0, 6.0, 9.0, 12.0, 15.0])


def test_a_prompt_larger_than_the_kv_pool_is_rejected_and_others_wait_for_blocks():
    # edge case: 50 blocks of 16 tokens hold 800; 912 never fit, two of 700 run one after the other
    requests = workload((0.0, 912, 1.0), (0.0, 700, 1e4), (1.0, 700, 1e4))
    for policy in POLICIES.values():
        result = checked(requests, policy(), toy_latency(0.1), kv_blocks=50)
        assert result.requests.outcome.tolist() == ["rejected", "finished", "finished"]
        assert result.requests.reason.tolist()[0] == "too_large"
        assert result.requests.met_slo.tolist()[0] is False
        assert result.requests.start_s[2] >= result.requests.first_token_s[1] - 1e-9


def test_never_more_batches_are_under_way_than_max_batches():
    requests = workload(*[(150.0 * at, 1000, 1e5 - 1e4 * at) for at in range(8)])
    result = checked(requests, ComposedPolicy("slack_edf", Alone(), "operator"), toy_latency(), max_batches=3)
    events = sorted(
        [(row.start_s, 1) for row in result.requests.itertuples()] + [(t, -1) for t in result.requests.finish_s]
    )
    assert max(np.cumsum([step for _, step in events])) == 3


def waiting_time_s(arrival_s: np.ndarray, service_s: np.ndarray) -> np.ndarray:
    """The mean wait of each of 20 stretches of one long run."""
    requests = workload(*zip(arrival_s.tolist(), service_s.tolist(), strict=True))
    result = checked(requests, POLICIES["fcfs"](), toy_latency(0.001))
    return np.array([part.mean() for part in np.array_split(result.requests.queued_s.to_numpy(), 20)])


@pytest.mark.parametrize("law", ["M/M/1", "M/D/1"])
def test_mean_waits_of_a_single_server_meet_queueing_theory(law):
    """Pollaczek and Khinchine: the mean wait is rate E[S^2] / (2 (1 - load)), at load 0.6."""
    rng = np.random.default_rng(7)
    n, load = 40_000, 0.6
    tokens = rng.geometric(1 / 1000, n) if law == "M/M/1" else np.full(n, 1000)
    square_s2 = 2.0 - 0.001 if law == "M/M/1" else 1.0  # of a geometric number of 1 ms tokens with mean 1 s
    parts = waiting_time_s(np.cumsum(rng.exponential(1 / load, n)), tokens)
    expected_s = load * square_s2 / (2 * (1 - load))
    half_width_s = 3.5 * parts.std(ddof=1) / math.sqrt(len(parts))
    assert abs(parts.mean() - expected_s) < half_width_s < 0.25 * expected_s


def test_one_event_per_uninterrupted_segment():
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    requests = mixed(rate_rps=6.0, num_requests=3000, seed=1)
    result = checked(requests, ComposedPolicy("slack_edf", SLOAware(), "operator"), latency)
    assert result.run["events"] / len(requests) < 3.5  # arrival + segment end, and two more for a preemption
    assert result.run["decisions"] / len(requests) < 3.5


def test_the_policy_never_changes_the_workload_and_a_run_repeats_itself():
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    requests = mixed(rate_rps=8.0, num_requests=400, seed=2)
    first, again = (checked(requests, POLICIES["slack_edf_operator"](), latency) for _ in range(2))
    assert first.requests.equals(again.requests)
    assert first.segments.equals(again.segments)
    other = checked(requests, POLICIES["fcfs"](), latency)
    assert other.requests.arrival_s.equals(first.requests.arrival_s)


def test_a_result_saved_and_loaded_is_the_same(tmp_path):
    requests = workload((0.0, 100, 500.0), (23.0, 5, 20.0), (23.0, 900), (24.0, 7, 1.0))
    result = checked(requests, POLICIES["slack_edf_operator"](), toy_latency(), kv_blocks=50)
    loaded = type(result).load(result.save(tmp_path / "run"))
    assert loaded.run == result.run
    for name, table in result.tables.items():
        for column, cells in table.items():
            assert np.array_equal(
                [str(cell) for cell in loaded.tables[name][column].tolist()],
                [str(cell) for cell in cells.tolist()],
            ), (name, column)
    (tmp_path / "run" / "segments.csv").unlink()
    with pytest.raises(ValueError, match=r"segments\.csv"):
        type(result).load(tmp_path / "run")


def test_an_empty_workload_gives_an_empty_result():
    result = checked([], POLICIES["fcfs"](), toy_latency())
    assert len(result.requests) == 0


def test_unsorted_or_misnumbered_requests_are_refused():
    late, early = workload((5.0, 10), (1.0, 10))
    with pytest.raises(ValueError, match="sort the workload"):
        simulate([late, early], policy=POLICIES["fcfs"](), latency=toy_latency())
    with pytest.raises(ValueError, match="ids must be"):
        simulate([early], policy=POLICIES["fcfs"](), latency=toy_latency())


def test_strict_refuses_prompts_beyond_the_measured_range_and_names_the_operator():
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    with pytest.raises(ValueError, match=r"40000 prompt tokens.*attention"):
        simulate(workload((0.0, 40_000)), policy=POLICIES["fcfs"](), latency=latency, strict=True)
    result = checked(workload((0.0, 40_000), (0.0, 4000)), POLICIES["fcfs"](), latency)
    assert result.requests.extrapolated.tolist() == [True, False]


@pytest.mark.parametrize("name", POLICIES)
def test_twice_the_times_at_half_the_rate_double_every_ttft(name):
    rng = random.Random(3)
    rows = [(at, rng.randint(1, 900), rng.choice([20.0, 200.0])) for at in np.cumsum(np.full(60, 30.0)).tolist()]
    single = checked(workload(*rows), POLICIES[name](), toy_latency(0.1))
    double = checked(workload(*[(2 * at, n, 2 * slo) for at, n, slo in rows]), POLICIES[name](), toy_latency(0.2))
    assert double.requests.ttft_s.to_numpy() == pytest.approx(2 * single.requests.ttft_s.to_numpy())
