"""Laws of the synthetic workloads: arrivals, lengths, classes and SLOs."""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowsim.workload import mixed, uniform
from flowsim.workload.arrivals import arrival_times
from flowsim.workload.lengths import QuantileTable, load_quantiles
from flowsim.workload.slo import ClassSLO, class_slos

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FLOWSIM_DATA", ROOT / ".." / "shared" / "data"))
PAPER_PROMPT_TOKENS = {  # mean, P99, standard deviation; trace tokens + 2 except for the last
    "text": (648, 3258, 630),
    "image": (395, 810, 113),
    "search": (5057, 15129, 3070),
    "file": (4134, 10562, 3519),
}


def lengths_and_classes(requests):
    return [(r.prompt_tokens, r.slo_class, r.ttft_slo_s, r.tbt_slo_s) for r in requests]


def uniform_workload(**changes):
    return uniform(
        **{
            "rate_rps": 2.0,
            "num_requests": 200,
            "min_tokens": 5,
            "max_tokens": 9,
            "ttft_slo_s": 0.5,
            **changes,
        }
    )


# ---------------------------------------------------------------- arrivals


def test_poisson_arrivals_start_at_zero_and_never_step_back():
    arrival_s = arrival_times("poisson", np.random.default_rng(0), 3.0, 1000)
    assert arrival_s[0] == 0.0
    assert (np.diff(arrival_s) >= 0).all()


def test_the_mean_rate_of_ten_thousand_requests_is_within_two_percent_of_the_rate_asked_for():
    requests = mixed(rate_rps=200.0, num_requests=10_000, seed=1)
    rate_rps = (len(requests) - 1) / (requests[-1].arrival_s - requests[0].arrival_s)
    assert rate_rps == pytest.approx(200.0, rel=0.02)


def test_gaps_have_the_coefficient_of_variation_of_a_poisson_process():
    gaps_s = np.diff(arrival_times("poisson", np.random.default_rng(4), 6.0, 20_000))
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1.0, abs=0.04)


@pytest.mark.parametrize("rate_rps", [0.0, -1.0, math.nan, math.inf, 5e-324])
def test_a_rate_that_is_no_positive_finite_number_is_refused(rate_rps):
    with pytest.raises(ValueError, match="rate_rps is"):
        arrival_times("poisson", np.random.default_rng(0), rate_rps, 10)


@pytest.mark.parametrize("n", [0, -1, 2.5, True])
def test_a_number_of_arrivals_that_is_no_positive_integer_is_refused(n):
    with pytest.raises(ValueError, match="integer of at least 1"):
        arrival_times("poisson", np.random.default_rng(0), 1.0, n)


# ---------------------------------------------------------------- mixed


def test_the_same_seed_gives_the_same_workload_and_another_seed_another():
    assert mixed(num_requests=500, seed=3) == mixed(num_requests=500, seed=3)
    assert mixed(num_requests=500, seed=3) != mixed(num_requests=500, seed=4)


def test_the_rate_scales_the_gaps_and_changes_neither_lengths_nor_classes():
    slow, fast = mixed(rate_rps=3.0, num_requests=800), mixed(rate_rps=12.0, num_requests=800)
    assert lengths_and_classes(slow) == lengths_and_classes(fast)
    assert [r.arrival_s for r in slow] == pytest.approx([4.0 * r.arrival_s for r in fast], rel=1e-12)


def test_a_longer_workload_begins_with_the_shorter_one():
    assert mixed(num_requests=1000)[:300] == mixed(num_requests=300)


def test_new_shares_leave_the_arrivals_as_they_are():
    usual, all_text = mixed(num_requests=400), mixed(num_requests=400, shares={"text": 1.0})
    assert [r.arrival_s for r in usual] == [r.arrival_s for r in all_text]
    assert {r.slo_class for r in all_text} == {"text"}


def test_classes_have_the_shares_of_the_paper_within_four_standard_errors():
    n = 40_000
    counts = Counter(r.slo_class for r in mixed(num_requests=n))
    for name, share in {"text": 0.691, "image": 0.073, "search": 0.202, "file": 0.034}.items():
        assert counts[name] / n == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / n))


def test_drawn_lengths_have_the_means_of_the_table_within_four_standard_errors():
    requests = mixed(num_requests=40_000, seed=2)
    for name, entry in load_quantiles("qwentrace").items():
        tokens = np.array([r.prompt_tokens for r in requests if r.slo_class == name])
        allowed = 4 * entry.prompt_tokens.std() / math.sqrt(len(tokens))
        assert tokens.mean() == pytest.approx(entry.prompt_tokens.mean(), abs=allowed)


def test_requests_hold_plain_numbers_and_one_output_token_and_ids_by_row():
    requests = mixed(num_requests=50)
    assert [r.id for r in requests] == list(range(50))
    kinds = {(type(r.id), type(r.arrival_s), type(r.prompt_tokens), type(r.ttft_slo_s)) for r in requests}
    assert kinds == {(int, float, int, float)}
    assert {r.output_tokens for r in requests} == {1}


def test_the_slo_scale_multiplies_both_slos_and_nothing_else():
    for one, half in zip(mixed(num_requests=300), mixed(num_requests=300, slo_scale=0.5), strict=True):
        assert (half.ttft_slo_s, half.tbt_slo_s) == (one.ttft_slo_s / 2, one.tbt_slo_s / 2)
        assert (half.arrival_s, half.prompt_tokens) == (one.arrival_s, one.prompt_tokens)


def test_given_slos_replace_the_presets_of_their_classes_only():
    slo_s = {r.slo_class: r.ttft_slo_s for r in mixed(num_requests=2000, ttft_slo_s={"text": 9.0})}
    assert slo_s == {"text": 9.0, "image": 0.5, "search": 4.0, "file": 6.0}


def test_a_model_without_presets_needs_an_slo_for_every_class():
    given_s = {"text": 1.0, "image": 2.0, "search": math.inf, "file": 4.0}
    requests = mixed(num_requests=2000, model="my-model", ttft_slo_s=given_s)
    assert {r.slo_class: r.ttft_slo_s for r in requests} == given_s
    with pytest.raises(ValueError, match=r"'my-model'.*llama3-8b.*workload\.ttft_slo_s"):
        mixed(model="my-model", slo="preset", ttft_slo_s={"text": 1.0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_requests": 0}, "num_requests is 0"),
        ({"num_requests": 5e3}, r"num_requests is 5000\.0"),
        ({"rate_rps": -2}, "rate_rps is -2"),
        ({"slo_scale": 0.0}, r"slo_scale is 0\.0"),
        ({"slo_scale": math.nan}, "slo_scale is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1.5}, r"seed is 1\.5"),
        ({"ttft_slo_s": {"txt": 1.0}}, "unknown class 'txt' in ttft_slo_s"),
        ({"ttft_slo_s": {"text": 0.0}}, r"class text is 0\.0"),
        ({"shares": {"text": 0.5, "file": 0.4}}, r"sum to 0\.9; they must sum to 1"),
        ({"shares": {"text": 1.5, "file": -0.5}}, r"class text is 1\.5"),
        ({"shares": {"video": 1.0}}, "unknown class 'video'"),
        ({"shares": {}}, "sum to 0"),
    ],
)
def test_an_argument_out_of_range_is_refused_with_what_was_given(arguments, message):
    with pytest.raises(ValueError, match=message):
        mixed(**arguments)


# ---------------------------------------------------------------- uniform


def test_uniform_prompts_fill_their_range_with_both_ends():
    requests = uniform_workload(output_tokens=3, slo_scale=2.0)
    assert {r.prompt_tokens for r in requests} == {5, 6, 7, 8, 9}
    assert {(r.ttft_slo_s, r.tbt_slo_s, r.output_tokens) for r in requests} == {(1.0, math.inf, 3)}


def test_uniform_keeps_its_lengths_when_the_rate_changes_and_repeats_with_the_seed():
    assert uniform_workload(seed=7) == uniform_workload(seed=7)
    assert lengths_and_classes(uniform_workload()) == lengths_and_classes(uniform_workload(rate_rps=50.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_tokens": 0}, "min_tokens is 0"),
        ({"max_tokens": 4}, "max_tokens is 4; it must be at least min_tokens, 5"),
        ({"output_tokens": 0}, "output_tokens is 0"),
        ({"ttft_slo_s": -1.0}, r"ttft_slo_s of class default is -1\.0"),
        ({"slo_scale": -1.0}, "slo_scale"),
        ({"rate_rps": 0.0}, "rate_rps"),
    ],
)
def test_uniform_refuses_an_argument_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        uniform_workload(**arguments)


# ---------------------------------------------------------------- SLO presets


def test_llama_31_has_the_presets_of_llama_3():
    assert class_slos("llama3.1-8b") == class_slos("llama3-8b")
    assert class_slos("llama3-8b")["file"] == ClassSLO(ttft_s=6.0, tbt_s=0.2)
    assert class_slos("qwen2.5-14b")["search"].ttft_s == 6.5
    assert class_slos("llama3-70b")["text"] == ClassSLO(ttft_s=1.0, tbt_s=0.1)


# ---------------------------------------------------------------- quantile tables


@pytest.mark.parametrize("name", list(PAPER_PROMPT_TOKENS))
def test_the_shipped_table_has_the_moments_of_the_paper(name):
    table = load_quantiles("qwentrace")[name].prompt_tokens
    mean, p99, std = PAPER_PROMPT_TOKENS[name]
    tokens = np.rint(table.quantile((np.arange(500_000) + 0.5) / 500_000))
    assert tokens.mean() == pytest.approx(mean, rel=0.04)
    assert np.quantile(tokens, 0.99) == pytest.approx(p99, rel=0.03)
    if name != "image":  # its deviation hangs on one request of 24; the experiment reports it
        assert tokens.std() == pytest.approx(std, rel=0.10)


def test_every_class_has_a_knot_at_the_99th_percentile_and_its_measured_requests_are_counted():
    classes = load_quantiles("qwentrace")
    assert all(0.99 in entry.prompt_tokens.levels for entry in classes.values())
    points = {name: entry.points for name, entry in classes.items()}
    assert points == {"text": 226, "image": 24, "search": 66, "file": 11}


def test_the_table_regenerates_byte_for_byte(monkeypatch):
    if not (DATA / "flowprefill_a800_llama31_8b_requests.csv").is_file():
        pytest.skip(f"no measured data in {DATA}; FLOWSIM_DATA names its folder")
    monkeypatch.syspath_prepend(ROOT)
    from experiments import mixed_quantiles

    text = mixed_quantiles.render(mixed_quantiles.prompt_tokens(DATA))
    assert text.encode() == mixed_quantiles.TABLE.read_bytes()


def test_a_missing_data_folder_is_named(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT)
    from experiments import mixed_quantiles

    monkeypatch.setenv("FLOWSIM_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit, match=r"nowhere.*FLOWSIM_DATA"):
        mixed_quantiles.data_folder()


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=30), st.integers(0, 2**32))
def test_draws_lie_within_the_table_and_its_moments_are_those_of_a_dense_grid(values, seed):
    values.sort()
    levels = np.linspace(0.0, 1.0, len(values))
    table = QuantileTable(levels=tuple(levels.tolist()), tokens=tuple(map(float, values)))
    drawn = table.sample(np.random.default_rng(seed), 100)
    assert values[0] <= drawn.min()
    assert drawn.max() <= values[-1]
    grid = table.quantile((np.arange(20_000) + 0.5) / 20_000)
    width = values[-1] - values[0]
    assert table.mean() == pytest.approx(grid.mean(), abs=1e-3 * width + 1e-9)
    assert table.std() == pytest.approx(grid.std(), abs=1e-3 * width + 1e-6)


@pytest.mark.parametrize(
    ("levels", "tokens", "message"),
    [
        ((0.0,), (5.0,), "at least 2"),
        ((0.0, 1.0), (5.0,), "2 levels and 1 token"),
        ((0.1, 1.0), (5.0, 6.0), r"from 0\.1 to 1\.0"),
        ((0.0, 0.5, 0.5, 1.0), (5.0, 6.0, 7.0, 8.0), "rise strictly"),
        ((0.0, math.nan, 1.0), (5.0, 6.0, 7.0), "rise strictly"),
        ((0.0, 1.0), (0.0, 6.0), "at least 1"),
        ((0.0, 1.0), (5.0, math.inf), "finite"),
        ((0.0, 1.0), (6.0, 5.0), "never fall"),
    ],
)
def test_a_table_that_is_no_distribution_is_refused_by_name(levels, tokens, message):
    with pytest.raises(ValueError, match=f"chat: .*{message}"):
        QuantileTable(levels=levels, tokens=tokens, name="chat")


@pytest.mark.parametrize("level", [-0.1, 1.1, math.nan])
def test_a_level_outside_zero_to_one_is_refused(level):
    table = QuantileTable(levels=(0.0, 1.0), tokens=(1.0, 2.0))
    with pytest.raises(ValueError, match=r"within 0\.\.1"):
        table.quantile([0.5, level])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no classes"),
        ("classes: [1]", "no classes"),
        ("classes: {a: 1}", "class a: found 1"),
        ("classes: {a: {share: 2, points: 1, quantiles: []}}", "class a: share is 2"),
        ("classes: {a: {share: 1, points: x, quantiles: []}}", "class a: points is 'x'"),
        ("classes: {a: {share: 1, points: 1, quantiles: 3}}", "class a: quantiles is 3"),
        ("classes: {a: {share: 1, points: 1, quantiles: [[0, x]]}}", "class a: quantile .*pair of numbers"),
        ("classes: {a: {share: 1, points: 1, quantiles: [[0, 5], [1, 4]]}}", "class a: .*never fall"),
        ("classes: {a: {share: .5, points: 1, quantiles: [[0, 5], [1, 6]]}}", r"shares of a sum to 0\.5"),
        ("classes: {a: [", "cannot be read as YAML"),
    ],
)
def test_a_broken_table_file_is_refused_with_file_and_class(tmp_path, content, message):
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"mine\.yaml: .*{message}"):
        load_quantiles(path)


def test_an_unknown_table_name_lists_the_shipped_ones():
    with pytest.raises(ValueError, match=r"'qwentrac'; shipped are .*qwentrace"):
        load_quantiles("qwentrac")
