"""Bounds beside what studies find: above every policy, of the same workloads, computed once, and refused where there
is none."""

from __future__ import annotations

import io
import json
import math

import pandas as pd
import pytest
from rich.console import Console
from test_bound import flowsim_command

import flowsim
from flowsim import LatencyModel, load_profile
from flowsim.bound import on_time_bound
from flowsim.bounded import bound_of, measured
from flowsim.check import check_result
from flowsim.config import build, compose
from flowsim.pool import Cluster
from flowsim.report import studies
from flowsim.study.telling import cells
from flowsim.variants import choices_of
from flowsim.workload import mixed

A100 = LatencyModel(load_profile("llama3-8b", "a100"))
SMALL = ["workload.num_requests=120"]
QUICK = {"seeds": (0,), "precision": 0.1, "jobs": 1}


@pytest.mark.parametrize(
    "policies",
    [
        pytest.param(["fcfs", "chunked_2k", "flowprefill", "feasible_set"], id="four"),
        pytest.param(choices_of("policy"), id="all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "overrides",
    [["workload.arrivals={gamma: {cv: 2}}"], ["cluster.instances=2", "workload.shares={text: 0.4, file: 0.6}"]],
    ids=["bursts", "two instances"],
)
def test_no_shipped_policy_has_a_goodput_above_the_bound(overrides, policies):
    table = flowsim.goodput([*SMALL, *overrides], {"policy": policies}, bound=True, **QUICK).table
    assert table.error.isna().all()
    assert table.bound_rps.nunique() == 1, "no policy changes what is possible"
    assert (table.bound_alone_rps <= table.bound_rps).all()
    reached = table[table.goodput_rps.notna()]
    assert len(reached) >= len(table) / 2
    assert (reached.goodput_rps <= reached.bound_rps).all()
    assert (reached.bound_share == reached.goodput_rps / reached.bound_rps).all()
    assert (reached.bound_alone_share == reached.goodput_rps / reached.bound_alone_rps).all()


def test_a_bound_is_that_of_the_same_workloads_at_each_rate_tried_and_is_computed_once():
    grid = {"policy": ["fcfs", "flowprefill"], "workload.slo_scale": [1.0, 2.0]}
    found = flowsim.goodput(SMALL, grid, seeds=(0, 3), precision=0.2, jobs=1, bound=True)
    keys = ["workload.slo_scale", "bound", "workload.rate_rps", "seed"]
    assert list(found.bounds.columns[: len(keys)]) == keys
    assert not found.bounds.duplicated(keys).any()
    for row in found.bounds.iloc[::5].to_dict("records"):
        requests = mixed(
            rate_rps=row["workload.rate_rps"], num_requests=120, seed=row["seed"], slo_scale=row["workload.slo_scale"]
        )
        alone = on_time_bound(requests, A100, batching=row["bound"])
        assert (row["on_time"], row["attainment"]) == (alone.on_time, alone.attainment)
    means = found.bounds.groupby(["workload.slo_scale", "bound", "workload.rate_rps"]).attainment.mean()
    for row in found.table.to_dict("records"):
        tried = means[row["workload.slo_scale"], "perfect"]
        assert row["bound_rps"] == tried[tried < 0.9].index.min()
        assert row["bound_rps"] <= 1.2 * tried[tried >= 0.9].index.max()
    pairs = found.table.pivot(index="workload.slo_scale", columns="policy", values="bound_rps")
    assert (pairs.fcfs == pairs.flowprefill).all()
    assert pairs.fcfs[2.0] > pairs.fcfs[1.0]


def test_without_asking_there_is_no_bound():
    found = flowsim.goodput(SMALL, **QUICK)
    assert found.bounds is None
    assert not [name for name in found.table.columns if name.startswith("bound")]


def test_the_share_has_an_interval_paired_by_seed():
    overrides = ["workload=azure_conv", "workload.num_requests=200"]
    row = flowsim.goodput(overrides, seeds=(0, 1, 2), precision=0.05, jobs=1, bound=True).table.iloc[0]
    assert row.bound_share_low < row.bound_share < row.bound_share_high
    spread = math.log(row.goodput_rps_high / row.goodput_rps_low)
    assert math.log(row.bound_share_high / row.bound_share_low) < spread, "a hard seed is hard for any schedule"


def test_a_bound_beyond_the_bracket_or_below_it_is_said_to_be():
    high = flowsim.goodput(SMALL, low_rps=0.5, high_rps=1.0, bound=True, **QUICK).table.iloc[0]
    assert (high.bound_end, high.bound_rps, high.bound_share) == ("high", 1.0, 1.0)
    low = flowsim.goodput(SMALL, low_rps=200.0, bound=True, **QUICK).table.iloc[0]
    assert (low.bracket_end, low.bound_end) == ("low", "low")
    assert math.isnan(low.bound_rps)
    assert math.isnan(low.bound_share)
    over = flowsim.goodput([*SMALL, "policy=fcfs"], low_rps=8.0, bound=True, **QUICK).table.iloc[0]
    assert math.isnan(over.bound_share)
    assert over.bound_rps > 8.0


def test_the_strictest_scale_has_a_bound_that_no_policy_passes():
    found = flowsim.slo_scale(
        [*SMALL, "workload.rate_rps=2"], {"policy": ["fcfs", "flowprefill", "feasible_set"]}, bound=True, **QUICK
    )
    table = found.table
    assert (table.bound_scale <= table.slo_scale).all()
    assert table.bound_scale.nunique() == 1
    assert table.bound_share.tolist() == pytest.approx((table.bound_scale / table.slo_scale).tolist())
    assert (table.bound_alone_scale >= table.bound_scale).all()


SETUPS = {
    "warm-up, cool-down and horizon": ["warmup_s=3", "cooldown_s=2", "horizon_s=25", "workload.rate_rps=6"],
    "one engine that decodes": ["cluster=colocated", "policy=vllm", "workload=azure_conv", "workload.rate_rps=12"],
    "prefill and decode apart": ["cluster=pd", "workload=azure_conv", "workload.rate_rps=12"],
    "failures": ["cluster.failures=[{at_s: 2, instance: 0, for_s: 4}]", "workload.rate_rps=8"],
}


@pytest.mark.parametrize("overrides", SETUPS.values(), ids=list(SETUPS))
@pytest.mark.parametrize("tbt", [[], ["workload.tbt_slo_s=0.05"]], ids=["TTFT", "TTFT and TBT"])
def test_the_bound_is_of_the_requests_that_are_measured_and_above_what_any_set_up_attains(overrides, tbt):
    setup = build(compose([*SMALL, *overrides, *tbt]))
    result = setup.run()
    check_result(result, Cluster.of(setup.cluster).hardware(setup.latency))
    figures = result.summary()
    bound = bound_of(setup, measured(setup), "perfect")
    assert bound.requests == figures["measured"]
    assert figures["attainment"] <= bound.attainment


def test_the_joint_goodput_of_an_engine_that_decodes_is_below_its_bound():
    overrides = ["workload=azure_conv", "workload.num_requests=80", "workload.tbt_slo_s=0.03", "cluster=colocated"]
    found = flowsim.goodput([*overrides, "policy=vllm"], attained="joint_attainment", bound=True, **QUICK)
    row = found.table.iloc[0]
    assert row.goodput_rps <= row.bound_rps
    assert found.bounds.joint_attainment.notna().all()


REFUSED = {
    "closed loop": ["workload=closed_loop"],
    "one pool": ["cluster=two_track", "router=two_track"],
    "jitter_sigma": ["cluster.jitter_sigma=0.1"],
    "prefix_cache=false": ["cluster=colocated", "policy=vllm", "workload=sessions"],
}


@pytest.mark.parametrize("offered", REFUSED)
def test_what_has_no_bound_is_refused_before_anything_runs(offered, tmp_path):
    with pytest.raises(ValueError, match=offered):
        flowsim.goodput(REFUSED[offered], bound=True, folder=tmp_path / "study", **QUICK)
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize("study", [flowsim.goodput, flowsim.slo_scale])
def test_a_figure_that_is_not_about_ttft_has_no_bound(study):
    with pytest.raises(ValueError, match="'attainment'"):
        study(SMALL, attained="tbt_attainment", bound=True, **QUICK)


def test_the_command_writes_the_bound_everywhere_and_a_rerun_computes_nothing(tmp_path):
    command = ("task=goodput", "task.bound=true", "task.precision=0.1", "task.seeds=[0,1]", "task.jobs=1", *SMALL)
    done = flowsim_command(tmp_path, *command, "report=plots")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "goodput.json").read_text())
    assert found["bound_share"] == found["goodput_rps"] / found["bound_rps"]
    assert f"any schedule: at most {found['bound_rps']:.3g} req/s" in done.stdout
    assert f"reaches {found['bound_share']:.0%} of it" in done.stdout
    assert not [name for name in found["settings"] if name.startswith("bound")]
    bounds = pd.read_csv(tmp_path / "bounds.csv")
    assert set(bounds.bound) == {"alone", "perfect"}
    runs = pd.read_csv(tmp_path / "evaluations.csv")
    assert len(runs) == 2 * len(found["evaluations"])
    points = (tmp_path / "points.jsonl").read_bytes()
    assert points.count(b"\n") == len(runs) + len(bounds)
    assert (tmp_path / "goodput.png").stat().st_size > 5000
    again = flowsim_command(tmp_path, *command)
    assert again.stdout == done.stdout
    assert (tmp_path / "points.jsonl").read_bytes() == points


def test_the_command_shows_the_bound_of_each_cell_of_a_grid(tmp_path):
    grid = "task.grid={policy: [fcfs, flowprefill], tp: [1, 2]}"
    command = ("task=goodput", "task.bound=true", "task.precision=0.2", "task.seeds=[0]", "task.jobs=1", grid, *SMALL)
    done = flowsim_command(tmp_path, *command, "report=plots")
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "goodput.csv")
    assert (table.bound_share <= 1.0).all()
    assert {f"{share:.0%}" for share in table.bound_share} <= set(done.stdout.split())
    assert (tmp_path / "goodput.png").is_file()


def test_a_table_wider_than_the_terminal_is_folded_and_cuts_off_no_name():
    row = {
        "policy": "least_remaining_slack",
        "workload.arrivals": "poisson",
        "goodput_rps": 5.0,
        "bound_alone_rps": 9.0,
    }
    printed = Console(width=40, file=io.StringIO())
    printed.print(cells(pd.DataFrame([row]), ["policy", "workload.arrivals"], "goodput_rps", ["bound_alone_rps"]))
    text = printed.file.getvalue()
    assert "…" not in text
    assert sorted("".join(text.split()).replace("─", "")) == sorted(
        "".join([*row, "least_remaining_slack", "poisson59"])
    )


def test_a_search_among_rates_at_which_no_request_is_measured_says_so():
    with pytest.raises(ValueError, match=r"warmup_s, cooldown_s or horizon_s leave all its requests out.* take more"):
        flowsim.goodput([*SMALL, "warmup_s=5", "cooldown_s=2"], bound=True, **QUICK)


def test_a_target_and_a_low_rate_are_told_to_as_many_digits_as_they_have(tmp_path):
    command = ("task=goodput", "task.target=0.999", "task.precision=0.5", "task.seeds=[0]", "task.jobs=1")
    done = flowsim_command(tmp_path, *command, "workload.num_requests=60", "report=none")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "goodput.json").read_text())
    assert found["goodput_rps"] < 1.0
    assert f"goodput {found['goodput_rps']:.3g} req/s" in done.stdout
    assert "99.9% of all requests" in done.stdout


def test_with_a_target_of_each_class_the_bound_is_said_to_be_of_all_requests(tmp_path):
    command = ("task=goodput", "task.bound=true", "task.per_class=true", "task.precision=0.2", "task.seeds=[0]")
    done = flowsim_command(tmp_path, *command, "task.jobs=1", "report=plots", *SMALL)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "goodput.json").read_text())
    assert found["goodput_rps"] <= found["bound_rps"]
    assert "any schedule, of all requests: at most" in done.stdout


def test_a_mistyped_bound_is_named(tmp_path):
    done = flowsim_command(tmp_path, "task=goodput", "task.bound=7")
    assert (done.returncode, done.stdout) == (2, "")
    assert "task.bound" in done.stderr


def names_in(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_figure_of_a_grid_has_a_line_for_each_bound_and_one_for_each_cell_where_they_differ():
    rows = [
        {"policy": policy, "gpu": gpu, "tp": tp, "goodput_rps": 3.0 * tp, "bound_rps": 5.0 * tp + (gpu == "h100")}
        for policy in ("fcfs", "edf") for gpu in ("a100", "h100") for tp in (1, 2)
    ]  # fmt: skip
    table = pd.DataFrame(rows)
    drawn = studies.grid(table[table.gpu == "a100"], ["policy", "tp"], "goodput_rps", bounds=["bound_rps"])
    assert names_in(drawn) == ["fcfs", "edf", "any schedule, at most"]
    drawn = studies.grid(table, ["policy", "gpu", "tp"], "goodput_rps", bounds=["bound_rps"])
    assert len(names_in(drawn)) == 4 + 4
    bars = studies.grid(table[table.tp == 1], ["policy", "gpu"], "goodput_rps", bounds=["bound_rps"])
    assert names_in(bars) == ["any schedule, at most"]
    assert "(60%)" in " ".join(text.get_text() for text in bars.axes[0].texts)
