"""Shaping, SLOs by rule, closed loops, sessions, export, and the ends of a run."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
from toys import toy_latency, workload

from flowsim import Alone, ComposedPolicy, LatencyModel, SLOAware, load_profile, simulate
from flowsim.check import check_result
from flowsim.workload import (
    closed_loop,
    describe,
    load_trace,
    mixed,
    quantiles,
    sessions,
    uniform,
    write_trace,
)
from flowsim.workload.define import finish
from flowsim.workload.rows import Rows

FCFS = ComposedPolicy("arrival", Alone(), "request")


def rows(n=100, gap_s=1.0, tokens=None):
    prompts = np.arange(1, n + 1) * 100 if tokens is None else np.array(tokens)
    return Rows.of(np.arange(len(prompts)) * gap_s, prompts.astype(np.int64))


def flowprefill():
    return ComposedPolicy("slack_edf", SLOAware(), "operator")


# ---------------------------------------------------------------- shaping


def test_a_window_keeps_its_arrivals_and_begins_at_zero():
    requests = finish(rows(), window_s=[10, 20])
    assert [one.prompt_tokens for one in requests] == [100 * n for n in range(11, 21)]
    assert requests[0].arrival_s == 0.0
    with pytest.raises(ValueError, match="no request arrives within"):
        finish(rows(), window_s=[500, 600])


def test_a_rate_scales_gaps_exactly():
    requests = finish(rows(), rate_rps=5.0)
    assert 99 / requests[-1].arrival_s == pytest.approx(5.0)
    assert finish(rows(), rate_scale=2.0)[-1].arrival_s == pytest.approx(49.5)
    with pytest.raises(ValueError, match="not both"):
        finish(rows(), rate_rps=5.0, rate_scale=2.0)
    with pytest.raises(ValueError, match="all requests arrive at once"):
        finish(rows(gap_s=0.0), rate_rps=5.0)


def test_a_number_is_cut_before_and_a_duration_after_the_rate_is_scaled():
    assert len(finish(rows(), num_requests=10, rate_rps=5.0)) == 10
    assert len(finish(rows(), duration_s=10.0)) == 10
    assert len(finish(rows(), rate_scale=2.0, duration_s=10.0)) == 20
    for wrong in ({"num_requests": 0}, {"duration_s": 0.0}, {"resample": -1}, {"rate_scale": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            finish(rows(), **wrong)


def test_resampling_draws_rows_with_their_gaps_and_repeats_with_its_seed():
    source = Rows.of(np.cumsum([0.0, 1.0, 3.0, 1.0]), np.array([10, 20, 30, 40]))
    requests = finish(source, resample=4000, seed=1)
    assert requests == finish(source, resample=4000, seed=1)
    assert requests != finish(source, resample=4000, seed=2)
    assert {one.prompt_tokens for one in requests} == {20, 30, 40}
    assert requests[-1].arrival_s / 3999 == pytest.approx(5.0 / 3.0, rel=0.05)


def test_prompts_longer_than_the_context_are_cut_and_counted(caplog):
    with caplog.at_level(logging.WARNING, logger="flowsim"):
        requests = finish(rows(), max_context_tokens=5001)
    assert max(one.prompt_tokens for one in requests) == 5000
    assert "5001 tokens: 50 prompts" in caplog.text


# ---------------------------------------------------------------- classes and SLOs


def test_without_a_class_preset_the_slo_is_five_isolated_ttfts_and_at_least_a_quarter_second():
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    requests = finish(rows(tokens=[20, 8000]), isolated_s=latency.isolated_s)
    assert requests[0].ttft_slo_s == 0.25
    assert requests[1].ttft_slo_s == pytest.approx(5 * latency.isolated_s(8000))
    assert finish(rows())[0].ttft_slo_s == math.inf  # without a latency model there is nothing to go by
    with pytest.raises(ValueError, match="needs isolated_s"):
        finish(rows(), slo="isolated")


def test_classes_by_length_are_the_first_bin_that_holds_the_prompt():
    requests = finish(rows(tokens=[10, 1024, 1025, 90000]), length_classes={"short": 1024, "long": math.inf})
    assert [one.slo_class for one in requests] == ["short", "short", "long", "long"]
    with pytest.raises(ValueError, match="Make the last bound inf"):
        finish(rows(tokens=[2000]), length_classes={"short": 1024})
    with pytest.raises(ValueError, match="must rise"):
        finish(rows(), length_classes={"a": 10, "b": 10})


def test_stated_slos_come_before_the_rule_and_every_slo_is_scaled():
    bins = {"short": 1024, "long": math.inf}
    requests = finish(
        rows(tokens=[10, 5000]), length_classes=bins, ttft_slo_s={"short": 0.5}, tbt_slo_s=0.1, slo_scale=2.0
    )
    assert [one.ttft_slo_s for one in requests] == [1.0, math.inf]
    assert [one.tbt_slo_s for one in requests] == [0.2, 0.2]
    with pytest.raises(ValueError, match="did you mean 'short'"):
        finish(rows(tokens=[10]), length_classes=bins, ttft_slo_s={"shrt": 0.5})


def test_presets_follow_the_model_and_an_unknown_model_or_rule_is_named():
    assert {one.slo_class: one.ttft_slo_s for one in mixed(num_requests=300, model="llama3-70b")} == {
        "text": 1.0, "image": 2.0, "search": 15.0, "file": 18.0
    }  # fmt: skip
    with pytest.raises(ValueError, match="no SLO preset"):
        mixed(num_requests=5, model="gpt2", slo="preset")
    with pytest.raises(ValueError, match="unknown slo rule 'presets'"):
        mixed(num_requests=5, slo="presets")


def test_an_unknown_keyword_of_a_workload_is_answered_with_near_names():
    with pytest.raises(ValueError, match="did you mean 'rate_rps'"):
        mixed(rte_rps=3.0)


# ---------------------------------------------------------------- synthetic tables


@pytest.mark.parametrize("table", ["azure_code", "azure_conv", "mooncake", "long_docs"])
def test_a_shipped_table_draws_lengths_with_its_mean_and_outputs_of_their_own(table):
    from flowsim.workload.lengths import load_quantiles

    (entry,) = load_quantiles(table).values()
    requests = quantiles(table=table, num_requests=20_000, seed=1)
    prompts = np.array([one.prompt_tokens for one in requests])
    outputs = np.array([one.output_tokens for one in requests])
    assert prompts.mean() == pytest.approx(entry.prompt_tokens.mean(), rel=0.03)
    assert outputs.mean() == pytest.approx(entry.output_tokens.mean(), rel=0.03)
    assert abs(np.corrcoef(prompts, outputs)[0, 1]) < 0.03


def test_sessions_grow_one_context_and_share_system_prompts():
    requests = sessions(num_sessions=60, system_prompts=2, system_tokens=320, block_tokens=16, seed=1)
    assert [one.arrival_s for one in requests] == sorted(one.arrival_s for one in requests)
    heads = {one.prefix_hashes[:20] for one in requests}
    assert len(heads) == 2  # 320 tokens are 20 blocks of one of two system prompts
    for one in requests:
        assert len(one.prefix_hashes) == one.prompt_tokens // 16
    last = max(requests, key=lambda one: one.prompt_tokens)
    earlier = [one for one in requests if last.prefix_hashes[: len(one.prefix_hashes)] == one.prefix_hashes]
    assert len(earlier) >= 2  # the turns before it are prefixes of it


# ---------------------------------------------------------------- closed loop


def test_a_user_of_a_closed_loop_has_one_request_under_way_at_a_time():
    loop = closed_loop(users=5, think_s=0.05, num_requests=300, seed=1)
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    result = simulate(loop, policy=flowprefill(), latency=latency)
    check_result(result, latency)
    requests = result.requests
    assert len(requests) == 300
    assert requests.arrival_s.is_monotonic_increasing
    events = sorted([(t, 1) for t in requests.arrival_s] + [(t, -1) for t in requests.finish_s])
    assert max(np.cumsum([step for _, step in events])) == 5


def test_every_policy_meets_the_same_users():
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    runs = [
        simulate(closed_loop(users=8, num_requests=200, seed=2), policy=policy, latency=latency)
        for policy in (flowprefill(), ComposedPolicy("arrival", SLOAware(), "request"))
    ]
    assert sorted(runs[0].requests.prompt_tokens) == sorted(runs[1].requests.prompt_tokens)
    assert not np.array_equal(runs[0].requests.arrival_s, runs[1].requests.arrival_s)


def test_users_that_do_not_think_never_stop_the_clock():
    loop = closed_loop(users=3, think_s=0.0, num_requests=30)
    result = simulate(loop, policy=flowprefill(), latency=toy_latency(0.001))
    check_result(result)
    assert len(result.requests) == 30
    assert result.summary()["utilisation"] == pytest.approx(1.0)


# ---------------------------------------------------------------- export and description


@pytest.mark.parametrize("make", [mixed, uniform, sessions])
def test_a_written_trace_replays_exactly(make, tmp_path):
    requests = make(seed=4)
    assert load_trace(write_trace(requests, tmp_path / "trace.csv")) == requests


def test_a_workload_is_described_in_two_lines():
    lines = describe(mixed(num_requests=1000, seed=1)).splitlines()
    assert len(lines) == 2
    assert "1000 requests" in lines[0]
    assert "requests/s" in lines[0]
    assert "text 6" in lines[1]
    assert describe([]) == "no requests\n"


# ---------------------------------------------------------------- the ends of a run


def test_a_horizon_stops_the_clock_and_what_has_not_finished_is_missed():
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    requests = mixed(rate_rps=20.0, num_requests=2000, seed=1)
    result = simulate(requests, policy=flowprefill(), latency=latency, horizon_s=30.0)
    check_result(result, latency)
    figures = result.summary()
    assert figures["requests"] == sum(one.arrival_s <= 30.0 for one in requests)
    assert figures["left_out"]["after_horizon"] == 2000 - figures["requests"]
    assert figures["unfinished"] > 50
    assert figures["simulated_s"] <= 30.0 + latency.profile.request_s
    missed = result.requests[result.requests.outcome == "unfinished"]
    assert (missed.met_slo == False).all()  # noqa: E712
    whole = simulate(requests, policy=flowprefill(), latency=latency).requests
    done = result.requests[result.requests.outcome == "finished"]
    assert done.ttft_s.to_numpy() == pytest.approx(whole.ttft_s[done.id].to_numpy())


def test_what_runs_at_the_horizon_is_busy_until_there_and_not_until_the_last_event():
    requests = workload((0.0, 100), (10.0, 5))  # a second per token
    result = simulate(requests, policy=FCFS, latency=toy_latency(), horizon_s=40.0)
    check_result(result, toy_latency())
    assert result.tables["segments"]["end_s"].tolist() == [40.0]
    assert result.tables["segments"]["ended"].tolist() == ["cut"]
    assert result.summary()["utilisation"] == 1.0
    assert result.summary()["simulated_s"] == 40.0


def test_what_is_suspended_at_the_horizon_was_so_until_there():
    rows = [(0.0, 100, 1000.0), (10.0, 60, 61.0)]
    latency = toy_latency(layers=100)
    result = simulate(workload(*rows), policy=flowprefill(), latency=latency, horizon_s=50.0)
    check_result(result, latency)
    paused_s = result.tables["preemptions"]["stopped_s"].tolist()
    assert len(paused_s) == 1
    assert result.tables["requests"]["suspended_s"][0] == pytest.approx(50.0 - paused_s[0])


def test_a_run_that_ends_before_its_horizon_ends_there():
    result = simulate(workload((0.0, 10)), policy=FCFS, latency=toy_latency(), horizon_s=1000.0)
    assert result.summary()["simulated_s"] == 10.0
    assert result.summary()["utilisation"] == 1.0


def test_a_run_that_is_stopped_is_what_it_was_till_then_and_says_so():
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    requests = mixed(rate_rps=10.0, num_requests=3000, seed=1)
    seen: list[tuple[int, float]] = []
    result = simulate(
        requests,
        policy=flowprefill(),
        latency=latency,
        progress=lambda ended, now_s: seen.append((ended, now_s)),
        stop=lambda: len(seen) == 4,
    )
    check_result(result, latency)
    assert result.run["partial"]
    ended, now_s = seen[-1]
    assert (result.requests.outcome == "finished").sum() == ended
    assert len(result.requests) == sum(one.arrival_s <= now_s for one in requests)
    whole = simulate(requests, policy=flowprefill(), latency=latency, stop=lambda: False)
    assert not whole.run["partial"]
    done = result.requests[result.requests.outcome == "finished"]
    assert done.ttft_s.to_numpy() == pytest.approx(whole.requests.ttft_s[done.id].to_numpy())


def test_warm_up_and_cool_down_run_but_are_in_no_figure_and_are_counted():
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    requests = mixed(rate_rps=6.0, num_requests=600, seed=1)
    whole = simulate(requests, policy=flowprefill(), latency=latency)
    middle = simulate(requests, policy=flowprefill(), latency=latency, warmup_s=20.0, cooldown_s=10.0)
    assert whole.requests.ttft_s.equals(middle.requests.ttft_s)
    figures = middle.summary()
    inside = middle.requests[middle.requests.measured]
    assert inside.arrival_s.min() >= 20.0
    assert inside.arrival_s.max() <= requests[-1].arrival_s - 10.0
    assert figures["attainment"] == pytest.approx(inside.met_slo.astype(bool).mean())
    assert figures["measured"] + figures["left_out"]["warmup"] + figures["left_out"]["cooldown"] == 600
    for wrong in ({"warmup_s": -1.0}, {"cooldown_s": math.inf}, {"horizon_s": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            simulate(requests, policy=flowprefill(), latency=latency, **wrong)


# ---------------------------------------------------------------- what was got wrong once


def test_a_closed_loop_keeps_to_the_models_context():
    loop = closed_loop(table="mooncake", num_requests=200, users=3, max_context_tokens=32_768)
    result = simulate(loop, policy=flowprefill(), latency=toy_latency(1e-5))
    assert result.requests.prompt_tokens.max() == 32_767


def test_a_closed_loop_cannot_leave_the_clocks_range():
    with pytest.raises(ValueError, match="the clock ends"):
        simulate(closed_loop(think_s=1e9, num_requests=100), policy=flowprefill(), latency=toy_latency(0.001))


def test_stated_slos_of_a_preset_class_that_was_not_drawn_are_fine():
    requests = mixed(num_requests=5, seed=0, ttft_slo_s={"text": 0.3, "file": math.inf})
    assert all(one.ttft_slo_s == 0.3 for one in requests if one.slo_class == "text")


def test_an_slo_scaled_to_nothing_is_refused():
    with pytest.raises(ValueError, match="slo_scale"):
        finish(rows(), ttft_slo_s=1e-300, slo_scale=1e-300)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"window_s": 5}, "two seconds"),
        ({"window_s": ["a", "b"]}, "two seconds"),
        ({"length_classes": 5}, "longest prompt in tokens"),
        ({"length_classes": {"a": "x"}}, "numbers of tokens"),
    ],
)
def test_a_key_of_the_wrong_kind_is_named(keys, message):
    with pytest.raises(ValueError, match=message):
        finish(rows(), **keys)


def test_sessions_without_a_prompt_are_refused():
    with pytest.raises(ValueError, match="no session has a prompt"):
        sessions(num_sessions=5, system_tokens=32_767)


def test_a_run_of_sessions_replays_with_its_hashes(tmp_path):
    requests = sessions(num_sessions=10, seed=1)
    result = simulate(requests, policy=flowprefill(), latency=toy_latency(1e-5))
    loaded = load_trace(result.save(tmp_path) / "requests.csv")
    assert [one.prefix_hashes for one in loaded] == [one.prefix_hashes for one in requests]


def test_a_class_with_markup_or_a_formula_for_a_name_is_shown_as_it_is(tmp_path):
    from dataclasses import replace
    from io import StringIO

    from rich.console import Console

    from flowsim.report.plots import ttft_cdf
    from flowsim.report.terminal import class_table

    names = ["[/bold]", r"$\frac{$", "_hidden"]
    requests = [replace(one, slo_class=names[one.id % 3]) for one in mixed(num_requests=30)]
    result = simulate(requests, policy=flowprefill(), latency=toy_latency(1e-4))
    console = Console(file=StringIO(), width=100)
    console.print(class_table(result, "[/red]"))
    assert all(name in console.file.getvalue() for name in [*names, "[/red]"])
    ttft_cdf(result, "a run").savefig(tmp_path / "ttft.png")
