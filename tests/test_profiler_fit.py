"""Laws of the fitted latency curves."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowsim.profiler.evaluate import experts_touched
from flowsim.profiler.fit import fit_dense, fit_experts
from flowsim.profiler.terms import (
    fit_attention,
    fit_attention_without_prefix,
    fit_decode_attention,
    fit_mixed_attention,
)

GRID = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192]


def dense_curve(n: float) -> float:
    """100 us of weights, 0.1 us a token up to 256 tokens, 0.4 us beyond."""
    return 100e-6 + 0.1e-6 * min(n, 256) + 0.4e-6 * max(0, n - 256)


def attention_curve(n: float) -> float:
    return 10e-6 + 33e-9 * n + 45e-12 * n * n


def test_a_clean_two_piece_curve_is_recovered_with_its_knot():
    fit = fit_dense("gemm", GRID, [dense_curve(n) for n in GRID])
    assert fit.knots_tokens == (256,)
    assert fit.constant_s == pytest.approx(100e-6)
    assert fit.slopes_s_per_token == pytest.approx((0.1e-6, 0.4e-6))
    assert fit.quality.heldout_mape < 0.01  # not 0: a fold without the point at 256 cannot put a knot there
    assert fit.quality.points == len(GRID)
    assert fit.quality.measured_tokens == (1, 8192)


def test_a_clean_straight_line_stays_one_piece():
    fit = fit_dense("gemm", GRID, [50e-6 + 0.2e-6 * n for n in GRID])
    assert fit.knots_tokens == ()
    assert fit.constant_s == pytest.approx(50e-6)
    assert fit.slopes_s_per_token == pytest.approx((0.2e-6,))


def test_noise_about_a_straight_line_does_not_buy_pieces():
    noise = random.Random(5)
    fit = fit_dense("gemm", GRID, [(50e-6 + 0.2e-6 * n) * noise.uniform(0.97, 1.03) for n in GRID])
    assert fit.knots_tokens == ()
    assert 0.0 < fit.quality.heldout_mape < 0.03


def test_the_order_of_the_points_does_not_matter():
    noise = random.Random(1)
    points = [(n, dense_curve(n) * noise.uniform(0.9, 1.1)) for n in GRID]
    shuffled = noise.sample(points, len(points))
    assert fit_dense("gemm", *zip(*points, strict=True)) == fit_dense("gemm", *zip(*shuffled, strict=True))


@settings(max_examples=30, deadline=None)
@given(
    latencies_s=st.lists(st.floats(1e-6, 1e-1), min_size=len(GRID), max_size=len(GRID)),
)
def test_a_dense_fit_to_any_latencies_is_positive_and_strictly_rising(latencies_s):
    fit = fit_dense("noise", GRID, latencies_s)
    times_s = [fit.seconds(n) for n in (*range(1, 1025), *range(1088, 32768, 64))]
    assert times_s[0] > 0.0
    assert all(earlier < later for earlier, later in pairwise(times_s))


@settings(max_examples=30, deadline=None)
@given(noise=st.lists(st.floats(0.6, 1.6), min_size=len(GRID), max_size=len(GRID)))
def test_an_attention_fit_to_noisy_latencies_rises_with_tokens_and_never_falls_with_context(noise):
    fit = fit_attention_without_prefix(
        "attention", GRID, [attention_curve(n) * factor for n, factor in zip(GRID, noise, strict=True)]
    )
    for cached in (0, 1, 4096):
        times_s = [fit.seconds(n, cached) for n in range(1, 16384, 61)]
        assert times_s[0] > 0.0
        assert all(earlier < later for earlier, later in pairwise(times_s))
    assert fit.seconds(64, 0) <= fit.seconds(64, 1) <= fit.seconds(64, 8192)


def test_a_clean_attention_curve_is_recovered_and_its_prefix_terms_are_marked_assumed():
    fit = fit_attention_without_prefix("attention", GRID, [attention_curve(n) for n in GRID])
    assert fit.seconds(3000) == pytest.approx(attention_curve(3000), rel=1e-9)
    assert fit.assumed == ("c*p", "p")
    assert fit.quality.r2 == pytest.approx(1.0)


@pytest.mark.parametrize("chunk_tokens", [2048, 4096])
def test_the_chunks_of_a_prompt_sum_to_its_whole_attention_within_one_percent(chunk_tokens):
    fit = fit_attention_without_prefix("attention", GRID, [attention_curve(n) for n in GRID])
    whole_s = fit.seconds(16384)
    chunks_s = [fit.seconds(chunk_tokens, start) for start in range(0, 16384, chunk_tokens)]
    assert sum(chunks_s) == pytest.approx(whole_s, rel=0.01)
    extra_calls_s = (len(chunks_s) - 1) * fit.seconds(0)
    assert sum(chunks_s) - extra_calls_s == pytest.approx(whole_s, rel=1e-9)


@pytest.mark.parametrize("fit", [fit_dense, fit_attention_without_prefix])
@pytest.mark.parametrize("latency_s", [0.0, -1e-6, math.nan, math.inf])
def test_a_latency_that_is_not_positive_and_finite_is_refused_by_name(fit, latency_s):
    latencies_s = [dense_curve(n) for n in GRID]
    latencies_s[3] = latency_s
    with pytest.raises(ValueError, match=rf"o_proj: point 3 \(8 tokens\) has a latency of {latency_s} s"):
        fit("o_proj", GRID, latencies_s)


@pytest.mark.parametrize("fit", [fit_dense, fit_attention_without_prefix])
@pytest.mark.parametrize("tokens", [0, -5, 2.5, math.nan])
def test_a_token_count_that_is_not_a_positive_whole_number_is_refused_by_name(fit, tokens):
    with pytest.raises(ValueError, match=rf"o_proj: point 0 has {tokens} tokens"):
        fit("o_proj", [tokens, *GRID], [1e-3] * (len(GRID) + 1))


@pytest.mark.parametrize("fit", [fit_dense, fit_attention_without_prefix])
def test_too_few_distinct_token_counts_are_refused_and_listed(fit):
    with pytest.raises(ValueError, match=r"rope: 3 distinct token counts \[1, 2, 4\]; a fit needs 8"):
        fit("rope", [1, 2, 4] * 5, [1e-6, 2e-6, 4e-6] * 5)


def test_token_counts_without_a_latency_each_are_refused():
    with pytest.raises(ValueError, match="act: 19 token counts but 1 latencies"):
        fit_dense("act", GRID, [1e-6])


def test_attention_that_does_not_grow_with_the_tokens_is_refused():
    with pytest.raises(ValueError, match="attention: the latencies do not grow"):
        fit_attention_without_prefix("attention", GRID, [1e-3 / n for n in GRID])


def prefix_points(floor=0):
    """Attention calls with cached tokens, and what they take: tiles of `floor` new tokens, linear in the prefix."""
    points = [(c, p) for c in (16, 32, 64, 128, 256, 512, 1024, 2048) for p in (0, 256, 1024, 4096, 16384)]
    return points, [
        5e-6 + 30e-9 * c + 20e-12 * c * c + 55e-12 * max(c, floor) * p + 2e-9 * p + 10e-9 * max(c, floor)
        for c, p in points
    ]


@pytest.mark.parametrize("floor", [0, 256])
def test_clean_attention_with_cached_tokens_is_recovered_with_its_floor(floor):
    points, latencies_s = prefix_points(floor)
    fit = fit_attention("attention", *zip(*points, strict=True), latencies_s)
    assert fit.floor_tokens == floor
    assert fit.assumed == ()
    assert fit.quality.heldout_mape < 1e-6
    assert fit.quality.measured_tokens == (16, 2048 + 16384)
    for (c, p), latency_s in zip(points, latencies_s, strict=True):
        assert fit.seconds(c, p) == pytest.approx(latency_s, rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(noise=st.lists(st.floats(0.5, 2.0), min_size=40, max_size=40))
def test_attention_with_cached_tokens_obeys_its_laws_whatever_the_noise_or_is_refused(noise):
    points, latencies_s = prefix_points(128)
    noisy_s = [latency_s * factor for latency_s, factor in zip(latencies_s, noise, strict=True)]
    refusal = ""
    try:
        fit = fit_attention("attention", *zip(*points, strict=True), noisy_s)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert "do not grow with the tokens" in refusal
        assert max(noise) > 1.25 * min(noise)  # mild noise is no reason to refuse
        return
    for cached in (0, 1, 20_000):
        times_s = [fit.seconds(n, cached) for n in range(1, 9000, 97)]
        assert times_s[0] > 0.0
        assert all(earlier < later for earlier, later in pairwise(times_s))
    assert fit.seconds(64, 0) <= fit.seconds(64, 1) <= fit.seconds(64, 8192)
    for chunk in (64, 1024):
        chunks_s = sum(fit.seconds(chunk, start) for start in range(0, 16384, chunk))
        assert chunks_s >= fit.seconds(16384) * (1.0 - 1e-9)


@pytest.mark.parametrize("factor", [0.1, 10.0])
@pytest.mark.parametrize("place", [3, 7, len(GRID) - 3])
def test_a_lone_point_far_off_is_left_out_reported_and_does_not_move_the_curve(place, factor):
    latencies_s = [dense_curve(n) for n in GRID]
    latencies_s[place] *= factor
    fit = fit_dense("gemm", GRID, latencies_s)
    (out,) = fit.quality.left_out
    assert (out.tokens, out.latency_s) == (GRID[place], latencies_s[place])
    assert out.expected_s == pytest.approx(dense_curve(GRID[place]), rel=0.05)
    assert fit.quality.points == len(GRID) - 1
    for n in GRID:
        assert fit.seconds(n) == pytest.approx(dense_curve(n), rel=0.05)


@settings(max_examples=30, deadline=None)
@given(
    noise=st.lists(st.floats(0.95, 1.05), min_size=len(GRID), max_size=len(GRID)),
    knot=st.sampled_from([8, 64, 256, 1024]),
    rise=st.floats(1.0, 8.0),
)
def test_a_curve_that_is_clean_but_for_small_noise_keeps_every_point(noise, knot, rise):
    curve = [100e-6 + 0.05e-6 * (min(n, knot) + rise * max(0, n - knot)) for n in GRID]
    fit = fit_dense("gemm", GRID, [y * factor for y, factor in zip(curve, noise, strict=True)])
    assert fit.quality.left_out == ()


def test_a_step_that_several_points_show_is_no_outlier():
    latencies_s = [dense_curve(n) * (3.0 if 16 <= n <= 96 else 1.0) for n in GRID]
    assert fit_dense("gemm", GRID, latencies_s).quality.left_out == ()


def test_clean_experts_are_recovered_in_tokens_and_experts_touched():
    touched = [experts_touched(128, 8, n) for n in GRID]
    latencies_s = [20e-6 + 0.3e-6 * n + 6e-6 * some for n, some in zip(GRID, touched, strict=True)]
    fit = fit_experts("experts", GRID, touched, latencies_s)
    assert fit.expert_s == pytest.approx(6e-6, rel=1e-3)
    assert fit.quality.heldout_mape < 1e-3
    for n, some, latency_s in zip(GRID, touched, latencies_s, strict=True):
        assert fit.seconds(n, some) == pytest.approx(latency_s, rel=1e-3)


def test_experts_touched_is_top_k_for_one_token_and_all_for_many():
    assert experts_touched(128, 8, 1) == pytest.approx(8.0)
    assert experts_touched(128, 8, 1) < experts_touched(128, 8, 2) < 16.0
    assert experts_touched(128, 8, 10_000) == pytest.approx(128.0)


def test_clean_decode_attention_is_recovered():
    points = [(n, kv) for n in (1, 4, 16, 64) for kv in (16, 64, 256, 512, 1024, 2048, 4096, 8192)]
    latencies_s = [5e-6 + 0.1e-6 * n + 0.5e-9 * n * kv + 1e-9 * kv for n, kv in points]
    fit = fit_decode_attention("decode attention", *zip(*points, strict=True), latencies_s)
    wanted = {"1": 5e-6, "n": 0.1e-6, "sum_kv": 0.5e-9, "mean_kv": 1e-9}
    assert fit.coefficients == pytest.approx(wanted)
    assert fit.quality.heldout_mape_core < 1e-9


def test_clean_mixed_attention_is_recovered():
    grid = [
        (q, kp, n, kv)
        for q in (16, 32, 64, 128, 256, 512, 1024, 2048)
        for kp in (0, 512)
        for n in (1, 16, 64)
        for kv in (64, 4096)
    ]
    wanted = {"1": 5e-6, "q": 9e-9, "work": 4e-11, "kp": 3e-9, "n": 2e-7, "sum_kv": 6e-10, "mean_kv": 1e-9, "nq": 1e-10}
    latencies_s = [
        5e-6
        + 9e-9 * q
        + 4e-11 * (q * kp + q * q / 2)
        + 3e-9 * kp
        + 2e-7 * n
        + 6e-10 * n * kv
        + 1e-9 * kv
        + 1e-10 * n * q
        for q, kp, n, kv in grid
    ]
    fit = fit_mixed_attention("mixed attention", *zip(*grid, strict=True), latencies_s)
    assert fit.coefficients == pytest.approx(wanted, rel=1e-6)
