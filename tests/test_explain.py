"""Why requests missed: every cause in an example worked out by hand, and laws of the sums."""

from __future__ import annotations

import csv
import functools
import subprocess
import sys

import pytest
from toys import checked, toy_latency, workload

from flowsim import LatencyModel, PrefillOnly, Request, Result, load_profile, simulate
from flowsim.config import compose, make
from flowsim.explain import CAUSES, LOST, explain, misses_by_cause
from flowsim.pool import Pool
from flowsim.predictor import Noisy
from flowsim.workload import mixed

SECOND = toy_latency(1.0)
A100 = LatencyModel(load_profile("llama3-8b", "a100"))


def shipped(name, *overrides):
    return make(compose([f"policy={name}", *(f"policy.{override}" for override in overrides)]), "policy")


def causes(requests, policy, **options):
    return {miss.request: miss.cause for miss in explain(checked(requests, policy, SECOND, **options))}


@pytest.mark.parametrize("name", ["fcfs", "chunked_2k", "flowprefill", "polling", "feasible_set", "layer_sedf"])
@pytest.mark.parametrize("instances", [1, 2])
def test_the_parts_of_a_slack_add_up_to_it_and_causes_add_up_to_all_misses(name, instances):
    requests = mixed(rate_rps=15.0 * instances, num_requests=250, seed=3)
    cluster = PrefillOnly(instances=instances, kv_blocks=1500)
    result = simulate(requests, policy=shipped(name), latency=A100, cluster=cluster)
    misses = explain(result)
    assert [miss.request for miss in misses] == [
        row for row, met in enumerate(result.tables["requests"]["met_slo"].tolist()) if met is False
    ]
    assert sum(sum(by_class.values()) for by_class in misses_by_cause(misses).values()) == len(misses) > 0
    for miss in misses:
        assert miss.cause in CAUSES
        assert miss.late_s > 0.0
        if miss.slack_s > 0.0:
            assert sum(miss.lost_s.values()) == pytest.approx(miss.slack_s, abs=1e-6)
        assert all(seconds >= 0.0 for seconds in miss.lost_s.values())


def test_what_was_never_possible_is_hopeless():
    assert causes(workload((0.0, 10, 9.0), (0.0, 5, 100.0)), shipped("fcfs")) == {0: "hopeless"}


def test_what_waits_for_a_step_of_decodes_says_so():
    """An SLO that leaves less to spare than the step that is running when it comes."""
    requests = [Request(id=0, arrival_s=0.0, prompt_tokens=4000, output_tokens=400)]
    slo_s = A100.isolated_s(16) + 1e-4
    requests.append(Request(id=1, arrival_s=1.5, prompt_tokens=16, ttft_slo_s=slo_s))
    result = simulate(requests, policy=shipped("vllm"), latency=A100, cluster=Pool(decode="here"))
    (miss,) = explain(result)
    assert miss.cause == "behind_decodes"
    assert miss.lost_s["behind_decodes"] == pytest.approx(miss.slack_s)


def test_a_short_request_behind_a_long_one_that_is_due_later_was_blocked_by_its_head_of_line():
    assert causes(workload((0.0, 100, 500.0), (1.0, 5, 20.0)), shipped("fcfs")) == {1: "behind_later"}


def test_waiting_behind_earlier_deadlines_is_overload_or_work_in_vain():
    on_time = workload((0.0, 50, 60.0), (0.0, 30, 70.0))
    assert causes(on_time, shipped("fcfs")) == {1: "behind_earlier"}
    in_vain = workload((0.0, 50, 40.0), (0.0, 30, 70.0))
    assert causes(in_vain, shipped("fcfs")) == {0: "hopeless", 1: "behind_lost"}


def test_a_suspended_request_was_preempted():
    # Request 0 (100 s, due 105) pauses at 10 for 1 (20 s, due 40).
    assert causes(workload((0.0, 100, 105.0), (5.0, 20, 35.0)), shipped("no_batching")) == {0: "preempted"}


def test_waiting_for_an_acknowledgement_is_blocking():
    # Request 1 (5 s, slack 3 s) waits from 1 to 10 for the end of an operator, and pauses request 0 there.
    (miss,) = explain(checked(workload((0.0, 100, 500.0), (1.0, 5, 8.0)), shipped("no_batching"), SECOND))
    assert (miss.cause, miss.lost_s["blocked"]) == ("blocked", pytest.approx(3.0))


def test_waiting_for_kv_blocks_is_kv():
    requests = workload((0.0, 80, 1000.0), (5.0, 30, 50.0))
    assert causes(requests, shipped("flowprefill"), kv_blocks=100, block_tokens=1) == {1: "kv"}


def test_a_batch_that_took_longer_than_its_member_alone_is_named():
    # Both run together for 18 s; the second, due at 15, alone would take 8.
    requests = workload((0.0, 10, 100.0), (0.0, 8, 15.0))
    policy = make(
        compose(["policy=fcfs", "policy.batching._target_=flowsim.batching.Everyone", "+policy.batching.max_jobs=2"]),
        "policy",
    )
    assert causes(requests, policy) == {1: "batched"}


def test_waiting_for_a_poll_is_idle():
    policy = shipped("polling", "consult.period_s=10.0")
    assert causes(workload((1.0, 5, 10.0)), policy) == {0: "idle"}


def test_requests_that_were_turned_away_say_why():
    requests = [
        Request(id=0, arrival_s=0.0, prompt_tokens=500, ttft_slo_s=1e4),
        Request(id=1, arrival_s=0.0, prompt_tokens=50, ttft_slo_s=1e4),
        Request(id=2, arrival_s=1.0, prompt_tokens=5, ttft_slo_s=100.0, abandon_s=3.0),
        Request(id=3, arrival_s=2.0, prompt_tokens=5, ttft_slo_s=4.0),
    ]
    found = causes(requests, shipped("fcfs", "admit=hopeless"), kv_blocks=100, block_tokens=1)
    assert found == {0: "too_large", 2: "abandoned", 3: "refused"}


def test_a_run_that_was_cut_leaves_some_unfinished():
    requests = workload((0.0, 100, 1000.0), (1.0, 50, 60.0), (29.0, 1))
    result = simulate(requests, policy=shipped("fcfs"), latency=SECOND, horizon_s=30.0)
    assert {miss.request: miss.cause for miss in explain(result)} == {0: "unfinished", 1: "behind_later"}


def test_a_miss_by_less_than_the_prediction_was_short_was_mispredicted():
    # Believed: half of everything. Request 0 (20 s) is thought to be on time with 1 s to spare after 10 s of 1.
    result = checked(workload((0.0, 10, 11.0), (0.0, 20, 25.0)), shipped("fcfs"), SECOND)
    assert [miss.cause for miss in explain(result)] == ["behind_earlier"]
    assert [miss.cause for miss in explain(result, lambda tokens: tokens / 2)] == ["mispredicted"]
    assert [miss.cause for miss in explain(result, lambda tokens: tokens * 2.0)] == ["mispredicted"]
    assert [miss.cause for miss in explain(result, float)] == ["behind_earlier"]


def test_prediction_errors_show_up_as_such():
    requests = mixed(rate_rps=11.0, num_requests=400, seed=1)
    counts = []
    for sigma in (0.0, 0.4):
        noisy = Noisy(A100, sigma=sigma)
        result = simulate(
            requests,
            policy=shipped("flowprefill"),
            latency=A100,
            predictor=functools.partial(Noisy, sigma=sigma),
        )
        counts.append(sum(miss.cause == "mispredicted" for miss in explain(result, noisy.alone_s)))
    assert counts[0] == 0 < counts[1]


def test_a_loaded_result_gives_the_same_explanation(tmp_path):
    result = simulate(mixed(rate_rps=14.0, num_requests=120, seed=2), policy=shipped("flowprefill"), latency=A100)
    assert explain(Result.load(result.save(tmp_path))) == explain(result)


def flowsim_command(folder, *arguments):
    command = [sys.executable, "-m", "flowsim", f"hydra.run.dir={folder}", "report=none", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_the_command_explains_its_own_run_and_a_finished_one(tmp_path):
    done = flowsim_command(tmp_path / "a", "task=explain", "workload.num_requests=150", "workload.rate_rps=16")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "a" / "misses.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {f"{name}_s" for name in LOST} <= set(rows[0])
    assert f"{len(rows)} requests missed their SLO" in done.stdout
    again = flowsim_command(tmp_path / "b", "task=explain", f"task.run={tmp_path / 'a'}")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "b" / "misses.csv").read_bytes() == (tmp_path / "a" / "misses.csv").read_bytes()
    absent = flowsim_command(tmp_path / "c", "task=explain", f"task.run={tmp_path / 'nowhere'}")
    assert absent.returncode == 2
    assert "not a run's folder" in absent.stderr
