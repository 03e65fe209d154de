"""What schedulers may believe: each predictor against the hardware, and what a view makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from toys import toy_latency, workload

from flowsim import (
    Alone,
    Batch,
    ComposedPolicy,
    LatencyModel,
    Part,
    PrefillOnly,
    SLOAware,
    Stops,
    TokenBudget,
    View,
    load_profile,
    simulate,
)
from flowsim.check import check_result
from flowsim.config import build, compose
from flowsim.core import Job
from flowsim.latency import Exact, Predictor
from flowsim.predictor import GRID_TOKENS, Noisy, Poly3

A100 = LatencyModel(load_profile("llama3-8b", "a100")).bound(pass_tokens=8192, stops=Stops.OPERATOR)
OVERHEADS = {"pass_s": 0.5, "request_s": 0.25}
FCFS = ComposedPolicy("arrival", Alone(), "operator")
BASES = {"exact": Exact, "poly3": Poly3}


@pytest.fixture(scope="module")
def poly3() -> Poly3:
    return Poly3(A100)


# ---------------------------------------------------------------- exact


@pytest.mark.parametrize("tokens", [1, 16, 200, 2048, 8192, 8193, 20_480, 50_000])
def test_exact_is_the_ttft_of_a_prompt_run_alone(tokens):
    result = simulate(workload((0.0, tokens)), policy=FCFS, latency=A100)
    check_result(result, A100)
    assert Exact(A100).alone_s(tokens) == pytest.approx(result.requests.ttft_s[0], rel=1e-12)


def test_exact_knows_batches_and_cached_tokens():
    # 0.5 s for the pass, a second a token, 0.25 s for the first token
    exact = Exact(toy_latency(**OVERHEADS))
    assert exact.batch_s([(5, 0), (3, 0)]) == pytest.approx(8.75)
    assert exact.batch_s([(8, 4)]) == pytest.approx(8.75)


# ---------------------------------------------------------------- poly3


def test_poly3_is_off_by_less_than_10_percent_at_any_length_of_the_grid_and_2_percent_on_average(
    poly3, record_property
):
    # relative weights: without them it is off by 15 % at 16 tokens
    for lengths in (GRID_TOKENS, range(64, 20_481, 8)):
        isolated_s = np.array([A100.isolated_s(tokens) for tokens in lengths])
        errors = np.abs(np.array([poly3.alone_s(tokens) for tokens in lengths]) / isolated_s - 1.0)
        worst = f"{100 * errors.max():.2f} % at {lengths[int(errors.argmax())]} tokens"
        record_property("mape", f"{100 * errors.mean():.2f} %, worst {worst}")
        assert errors.mean() < 0.02, worst
        assert errors.max() < 0.10, worst


def test_poly3_never_falls_and_stays_above_zero(poly3):
    predicted_s = np.array([poly3.alone_s(tokens) for tokens in range(1, 60_001)])
    assert (np.diff(predicted_s) >= 0.0).all()
    assert predicted_s[0] > 0.0


def test_poly3_has_a_floor_of_a_tenth_of_a_millisecond():
    # attention only: n * n us in all, so that 10 tokens and more are above the floor
    predicted = Poly3(toy_latency(1e-9, quadratic_s=5e-7))
    assert [predicted.alone_s(tokens) for tokens in (1, 5, 9)] == [1e-4] * 3
    assert predicted.alone_s(100) == pytest.approx(0.01, rel=0.01)


def test_poly3_never_falls_where_its_polynomial_does():
    # 10 s a pass and nothing else: steps at 8192 and 16384 tokens, between which the polynomial falls
    predicted = Poly3(toy_latency(1e-9, pass_s=10.0))
    assert (np.diff([predicted.alone_s(tokens) for tokens in range(1, 21_000)]) >= 0.0).all()


def test_poly3_adds_a_chunk_and_10_ms_for_each_8192_tokens_beyond_20480(poly3):
    chunk_s = poly3.alone_s(8192) + 0.01
    for chunks in (1, 2, 4):
        assert poly3.alone_s(20_480 + 8192 * chunks) == pytest.approx(poly3.alone_s(20_480) + chunks * chunk_s)
    assert poly3.alone_s(20_480 + 2048) == pytest.approx(poly3.alone_s(20_480) + chunk_s / 4)


def test_poly3_is_exact_where_time_is_a_line_in_tokens_and_takes_a_batch_for_one_prompt():
    poly3 = Poly3(toy_latency(0.001, request_s=0.25))
    assert poly3.alone_s(1500) == pytest.approx(1.75)
    assert poly3.batch_s([(1000, 0), (500, 0)]) == pytest.approx(1.75)
    assert poly3.batch_s([(1000, 0), (500, 300)]) == pytest.approx(1.75)


def test_poly3_predicts_the_rest_of_a_prompt_up_to_its_first_token():
    latency = toy_latency(0.001, **OVERHEADS)
    assert Exact(latency).batch_s([(500, 300)]) == pytest.approx(1.25)
    assert Poly3(latency).batch_s([(500, 300)]) == pytest.approx(1.25, rel=0.1)


# ---------------------------------------------------------------- noisy


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("bias", "sigma"), [(0.0, 0.1), (0.3, 0.2), (-0.4, 0.05)])
def test_noisy_has_the_bias_and_the_sigma_that_were_asked_for(base, bias, sigma):
    true, noisy = BASES[base](A100), Noisy(A100, base=base, bias=bias, sigma=sigma, seed=11)
    lengths = range(1, 4001)
    errors = np.log([noisy.alone_s(tokens) / true.alone_s(tokens) for tokens in lengths])
    deviation = sigma / math.sqrt(len(lengths))
    assert errors.mean() == pytest.approx(math.log(1.0 + bias), abs=4 * deviation)
    assert errors.std(ddof=1) == pytest.approx(sigma, abs=4 * deviation / math.sqrt(2))
    assert abs(np.corrcoef(errors[1:], errors[:-1])[0, 1]) < 4 / math.sqrt(len(lengths))


@pytest.mark.parametrize("base", BASES)
def test_noisy_without_sigma_is_its_base_times_one_plus_the_bias(base):
    true, noisy = BASES[base](A100), Noisy(A100, base=base, bias=0.5, sigma=0.0)
    assert noisy.alone_s(700) == pytest.approx(1.5 * true.alone_s(700))
    assert noisy.batch_s([(700, 0), (80, 0)]) == pytest.approx(1.5 * true.batch_s([(700, 0), (80, 0)]))


def test_noisy_answers_the_same_question_the_same_whatever_was_asked_before():
    first, second = (Noisy(A100, seed=4) for _ in range(2))
    lengths = list(range(100, 200))
    answers_s = [first.alone_s(tokens) for tokens in lengths]
    assert [second.alone_s(tokens) for tokens in reversed(lengths)] == answers_s[::-1]
    assert [first.alone_s(tokens) for tokens in lengths] == answers_s
    assert first.batch_s([(150, 0)]) == answers_s[50]


def test_the_seed_of_noisy_changes_its_answers():
    one, other = Noisy(A100, seed=1), Noisy(A100, seed=2)
    assert all(one.alone_s(tokens) != other.alone_s(tokens) for tokens in range(100, 120))


def test_noise_changes_neither_the_workload_nor_the_jitter():
    # fcfs asks for no prediction: the whole run stays the same, on ranks with jitter
    overrides = ["policy=fcfs", "workload.num_requests=50", "workload.rate_rps=8", "cluster.jitter_sigma=0.1", "tp=2"]
    setups = [
        build(compose([*overrides, predictor, *more]))
        for predictor, *more in (["predictor=exact"], ["predictor=noisy"], ["predictor=noisy", "predictor.seed=9"])
    ]
    assert setups[1].requests == setups[0].requests
    results = [setup.run() for setup in setups]
    for result in results:
        check_result(result, setups[0].latency)
        assert result.requests.equals(results[0].requests)
    assert results[0].batches.slowest_rank.nunique() > 1


def test_noise_changes_what_a_policy_does_that_relies_on_predictions():
    overrides = ["policy=shortest", "workload.num_requests=200", "workload.rate_rps=12"]
    exact, noisy = (build(compose([*overrides, f"predictor={name}"])).run() for name in ("exact", "noisy"))
    assert noisy.requests.arrival_s.equals(exact.requests.arrival_s)
    assert not noisy.requests.start_s.equals(exact.requests.start_s)


def test_noisy_refuses_an_unknown_base_and_values_out_of_range():
    with pytest.raises(ValueError, match="poly3"):
        Noisy(A100, base="poly")
    for wrong in ({"bias": -1.0}, {"sigma": -0.1}, {"sigma": math.inf}, {"bias": math.nan}):
        with pytest.raises(ValueError, match="bias must be above -1"):
            Noisy(A100, **wrong)


# ---------------------------------------------------------------- what a view makes of it


class Watched:
    """A policy that writes down, each time it is asked, `left_s` of all work in sight."""

    def __init__(self, policy: ComposedPolicy) -> None:
        self.policy, self.stops = policy, policy.stops
        self.seen: list[tuple[float, str, int, float]] = []

    def select(self, view: View) -> Batch | None:
        for state, works in (
            ("waiting", view.waiting),
            ("suspended", view.suspended),
            ("running", [view.running] if view.running else []),
        ):
            self.seen += [(view.now_s, state, work.id, view.left_s(work)) for work in works]
        return self.policy.select(view)

    def left_s(self, at_s: float, state: str, number: int) -> float:
        """What was seen at a time."""
        found = [left_s for now_s, *what, left_s in self.seen if abs(now_s - at_s) < 1e-9 and what == [state, number]]
        assert len(set(found)) == 1, self.seen
        return found[0]


def watch(
    requests: list, policy: ComposedPolicy, predictor: Callable[[LatencyModel], Predictor], latency: LatencyModel
) -> Watched:
    watched = Watched(policy)
    result = simulate(
        requests, policy=watched, latency=latency, predictor=predictor, cluster=PrefillOnly(pass_tokens=10**6)
    )
    check_result(result, latency)
    return watched


# With a second a token and `OVERHEADS` a prompt of 100 tokens takes 0.5 + 100 + 0.25 s. All prompts run in one pass,
# so that time is a line in tokens, on which poly3 is exact.
# `HALF_MORE` believes in 1.5 times as much: 151.125 s.
HALF_MORE = partial(Noisy, bias=0.5, sigma=0.0)
BELIEFS = pytest.mark.parametrize(
    ("predictor", "times"),
    [(Exact, 1.0), (Poly3, 1.0), (HALF_MORE, 1.5), (partial(HALF_MORE, base="poly3"), 1.5)],
    ids=["exact", "poly3", "noisy", "noisy_poly3"],
)


@BELIEFS
def test_left_s_of_a_job_that_has_not_started_is_its_prediction(predictor, times):
    watched = watch(workload((0.0, 100), (10.0, 7)), FCFS, predictor, toy_latency(**OVERHEADS))
    assert watched.left_s(0.0, "waiting", 0) == pytest.approx(times * 100.75)
    assert watched.left_s(10.0, "waiting", 1) == pytest.approx(times * 7.75)


@BELIEFS
def test_left_s_of_a_running_batch_is_its_prediction_less_the_seconds_it_has_run(predictor, times):
    # half way: 50 s after the pass's 0.5 s
    watched = watch(workload((0.0, 100), (50.5, 7)), FCFS, predictor, toy_latency(**OVERHEADS))
    assert watched.left_s(50.5, "running", 0) == pytest.approx(times * 100.75 - 50.5)


@BELIEFS
def test_left_s_of_a_suspended_batch_stands_still(predictor, times):
    # operators of 10 s end at 10.5, 20.5, 30.5: paused there, seen again at 33 and when 1 ends at 36
    requests = workload((0.0, 100, 900.0), (23.0, 5, 90.0), (33.0, 7, 950.0))
    watched = watch(requests, ComposedPolicy("deadline", Alone(), "operator"), predictor, toy_latency(**OVERHEADS))
    for at_s in (30.5, 33.0, 36.0):
        assert watched.left_s(at_s, "suspended", 0) == pytest.approx(times * 100.75 - 30.5)


@BELIEFS
def test_left_s_of_a_job_between_its_chunks_is_what_its_done_tokens_leave(predictor, times):
    # chunks of 60: P(100) - P(60), 40 s of operators, and the 0.25 s of the first token
    policy = ComposedPolicy("arrival", TokenBudget(60), "pass")
    watched = watch(workload((0.0, 100)), policy, predictor, toy_latency(**OVERHEADS))
    assert watched.left_s(60.5, "waiting", 0) == pytest.approx(times * 40.0 + 0.25)


@BELIEFS
def test_left_s_of_a_batch_is_that_of_all_its_members(predictor, times):
    # 10 + 30 + 20 tokens as one pass; 15 s later 45.75 of its 60.75 s are left
    requests = workload((0.0, 10, 900.0), (0.0, 30, 901.0), (0.0, 20, 902.0), (15.0, 5))
    policy = ComposedPolicy("deadline", SLOAware(), "operator")
    watched = watch(requests, policy, predictor, toy_latency(**OVERHEADS))
    assert watched.left_s(15.0, "running", 0) == pytest.approx(times * 60.75 - 15.0)


def test_left_s_is_never_below_zero():
    # the predictor believes in a tenth: 10 s, over at 50
    watched = watch(workload((0.0, 100), (50.0, 7)), FCFS, partial(Noisy, bias=-0.9, sigma=0.0), toy_latency())
    assert watched.left_s(50.0, "running", 0) == 0.0


@pytest.mark.parametrize("tokens", [100, 3000, 16_000])
def test_now_plus_left_of_an_undisturbed_running_one_is_its_first_token_under_exact(tokens):
    isolated_s = A100.isolated_s(tokens)
    probes = [(isolated_s * share, 5) for share in (0.1, 0.33, 0.5, 0.9) if isolated_s * share < isolated_s - 0.005]
    requests = workload((0.0, tokens), *probes)
    watched = Watched(FCFS)
    result = simulate(requests, policy=watched, latency=A100)
    check_result(result, A100)
    for at_s, _ in probes:
        expected_s = result.requests.first_token_s[0]
        assert at_s + watched.left_s(at_s, "running", 0) == pytest.approx(expected_s, abs=1e-9)
    assert watched.left_s(0.0, "waiting", 0) == pytest.approx(isolated_s)


def test_cost_s_of_parts_is_the_prediction_of_the_batch():
    costs_s = []

    def cost_first(view: View, job: Job) -> bool:
        costs_s.append(view.cost_s([Part(one, one.left_tokens) for one in [*view.waiting, job]]))
        return True

    policy = ComposedPolicy("arrival", Alone(), "operator", admit=cost_first)
    simulate(workload((0.0, 10), (0.0, 30)), policy=policy, latency=toy_latency(**OVERHEADS), predictor=HALF_MORE)
    assert costs_s == pytest.approx([1.5 * 10.75, 1.5 * 40.75])
