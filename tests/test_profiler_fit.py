"""Laws of the fitted latency curves, and the committed Llama-3-8B profile rebuilt from the measured data."""

import math
import random
from itertools import pairwise

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import fit_llama3_8b_a100 as llama
from flowsim.profiler.fit import fit_dense
from flowsim.profiler.terms import fit_attention_without_prefix

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


def committed_llama3_8b():
    return yaml.safe_load(llama.PROFILE.read_text(encoding="utf-8"))


def test_refitting_the_measured_data_gives_exactly_the_committed_llama3_8b_profile_at_every_tp_degree():
    data = llama.data_folder()
    if not all((data / name).is_file() for name in llama.TABLES):
        pytest.skip("the measured data are not here; set FLOWSIM_DATA to their folder")
    refitted, committed = llama.build_profile(data), llama.PROFILE.read_text(encoding="utf-8")
    assert list(refitted["tp"]) == [1, 2, 4]
    assert yaml.safe_load(committed) == refitted
    assert llama.render(refitted) == committed


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_committed_llama3_8b_profile_rises_with_tokens_in_every_operator_and_over_the_pass(tp):
    profile, counts = committed_llama3_8b(), range(1, 16385, 13)
    for operator in profile["tp"][tp]["operators"]:
        times_s = [llama.operator_seconds(operator, n) for n in counts]
        assert all(earlier < later for earlier, later in pairwise(times_s)), operator["name"]
    times_s = [llama.pass_seconds(profile, n, tp=tp) for n in counts]
    assert all(earlier < later for earlier, later in pairwise(times_s))


def test_the_committed_llama3_8b_profile_meets_the_operator_sums_of_the_analysis():
    profile = committed_llama3_8b()
    assert llama.pass_seconds(profile, 2048) == pytest.approx(0.131, rel=0.05)
    assert llama.pass_seconds(profile, 8192) == pytest.approx(0.588, rel=0.05)


@pytest.mark.parametrize(("few", "many"), [(1, 2), (2, 4)])
def test_more_ranks_never_slow_the_compute_operators_of_a_layer_nor_beat_an_even_split(few, many):
    profile = committed_llama3_8b()
    for tokens in (*range(1, 1024), *range(1024, 16385, 16)):
        few_s, many_s = (llama.layer_seconds(profile, tokens, tp=tp, kinds=llama.COMPUTE) for tp in (few, many))
        assert few_s * few / many <= many_s <= few_s, f"{tokens} tokens"


@pytest.mark.parametrize("tp", [2, 4])
def test_a_layer_over_several_ranks_ends_both_of_its_blocks_with_the_same_all_reduce(tp):
    profile = committed_llama3_8b()
    operators = profile["tp"][tp]["operators"]
    last_of = {operator["boundary"]: operator for operator in operators}
    attention, mlp = last_of["o_proj"], last_of["down_proj"]
    assert [operator["name"] for operator in operators if operator["kind"] == "all_reduce"] == [
        "all_reduce_attention",
        "all_reduce_mlp",
    ]
    assert (attention["name"], mlp["name"]) == ("all_reduce_attention", "all_reduce_mlp")
    for tokens in (1, 512, 8192):
        each_s = llama.operator_seconds(attention, tokens)
        assert each_s == llama.operator_seconds(mlp, tokens)
        both_s = llama.layer_seconds(profile, tokens, tp=tp, kinds=["all_reduce"])
        assert both_s == pytest.approx(2 * each_s, rel=1e-12)


def test_one_gpu_has_the_same_operators_as_a_rank_but_no_all_reduce():
    profile = committed_llama3_8b()
    names = {
        tp: [operator["name"] for operator in section["operators"] if operator["kind"] != "all_reduce"]
        for tp, section in profile["tp"].items()
    }
    assert names[1] == names[2] == names[4]
    assert llama.pass_seconds(profile, 2048, kinds=["all_reduce"]) == 0.0
