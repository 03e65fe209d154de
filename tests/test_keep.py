"""What a result keeps: fewer tables, the same figures, and an error that says how to get the rest."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from toys import checked

from flowsim import ComposedPolicy, LatencyModel, Result, SLOAware, load_profile, simulate
from flowsim.__main__ import main
from flowsim.check import check_result
from flowsim.config import build, compose
from flowsim.keep import KEPT, SAMPLED
from flowsim.report.plots import ttft_cdf, worst_blocking
from flowsim.report.terminal import class_table
from flowsim.workload import mixed

POLICY = ComposedPolicy("slack_edf", SLOAware(), "operator")
FEWER = [keep for keep in KEPT if keep != "all"]
CLUSTERS = {
    "one instance": [],
    "several instances": ["cluster.instances=3", "workload.rate_rps=18"],
    "few blocks": ["cluster.kv_blocks=2500", "workload.rate_rps=12"],
    "pd": ["cluster=pd"],
    "colocated": ["cluster=colocated", "policy=vllm", "workload.rate_rps=1"],
    "failures": ["cluster.instances=2", "+cluster.failures=[{instance: 0, at_s: 5, for_s: 5}]"],
    "warm-up and horizon": ["warmup_s=5", "cooldown_s=5", "horizon_s=60"],
}
REAL = ("simulation_wall_s", "scheduler")  # seconds of this machine


def a100() -> LatencyModel:
    return LatencyModel(load_profile("llama3-8b", "a100"))


def run(keep: str, num_requests: int = 600, rate_rps: float = 6.0) -> Result:
    return simulate(
        mixed(rate_rps=rate_rps, num_requests=num_requests), policy=POLICY, latency=a100(), keep=keep, horizon_s=1e6
    )


def same(one: object, other: object) -> bool:
    """Equal, floats to the last digits: sums over blocks are rounded otherwise than sums over whole tables."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12)
    return one == other


@pytest.mark.parametrize("keep", FEWER)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_summary_has_the_same_figures_whatever_is_kept(cluster, keep):
    setup = build(compose(["workload.num_requests=400", *CLUSTERS[cluster]]))
    stream = random.Random(0)
    if cluster in ("pd", "colocated"):
        requests = [replace(request, output_tokens=stream.randint(1, 60)) for request in setup.requests]
        setup = replace(setup, requests=requests)
    whole, less = setup.run().summary(), replace(setup, keep=keep).run().summary()
    assert whole.keys() == less.keys()
    different = [name for name in whole if name not in REAL and not same(whole[name], less[name])]
    assert different == []


def test_attainment_and_quantiles_are_exact_from_a_summary_alone():
    whole, less = run("all", 2000).summary(), run("summary", 2000).summary()
    for name in ("attainment", "attainment_by_class", "ttft_s", "ttft_s_by_class", "preemptions", "batches"):
        assert whole[name] == less[name], name


def test_of_requests_the_whole_table_is_kept_and_nothing_else():
    whole, less = run("all"), run("requests")
    assert list(less.tables) == ["requests"]
    for name, cells in whole.tables["requests"].items():
        np.testing.assert_array_equal(cells, less.tables["requests"][name])


def test_a_sample_has_its_requests_with_all_their_batches_and_segments():
    whole, less = run("all", 3000), run("sample", 3000)
    ids = less.tables["sample_requests"]["id"]
    assert len(ids) == SAMPLED
    assert (np.diff(ids) > 0).all()
    for name, cells in whole.tables["requests"].items():
        np.testing.assert_array_equal(cells[ids], less.tables["sample_requests"][name])
    members = np.isin(whole.tables["batches"]["request"], ids)
    for name, cells in whole.tables["batches"].items():
        np.testing.assert_array_equal(cells[members], less.tables["sample_batches"][name])
    theirs = np.isin(whole.tables["segments"]["batch"], whole.tables["batches"]["batch"][members])
    for name, cells in whole.tables["segments"].items():
        np.testing.assert_array_equal(cells[theirs], less.tables["sample_segments"][name])


def test_the_sample_is_the_same_under_any_policy_and_another_with_another_seed():
    requests, fcfs = mixed(rate_rps=6.0, num_requests=2000), ComposedPolicy("arrival", SLOAware(), "pass")
    drawn = [
        simulate(requests, policy=policy, latency=a100(), keep="sample", seed=seed).tables["sample_requests"]["id"]
        for policy, seed in ((POLICY, 0), (fcfs, 0), (POLICY, 1))
    ]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert set(drawn[0]) != set(drawn[2])


def test_a_sample_of_few_requests_is_all_of_them():
    assert run("sample", 20).tables["sample_requests"]["id"].tolist() == list(range(20))


def test_a_sample_leaves_out_what_never_arrived():
    requests = mixed(rate_rps=6.0, num_requests=500)
    result = simulate(requests, policy=POLICY, latency=a100(), keep="sample", horizon_s=20.0)
    ids = result.tables["sample_requests"]["id"]
    assert len(ids) == result.summary()["requests"]
    assert len(ids) < 500


@pytest.mark.parametrize("keep", FEWER)
def test_what_was_kept_is_saved_and_loaded(keep, tmp_path):
    result = run(keep)
    again = Result.load(result.save(tmp_path))
    assert list(again.tables) == list(result.tables) == list(KEPT[keep])
    assert again.summary() == result.summary()
    assert {path.stem for path in tmp_path.iterdir()} == {*KEPT[keep], "run", "summary"}
    for name, table in result.tables.items():
        for column, cells in table.items():
            np.testing.assert_array_equal(cells, again.tables[name][column], err_msg=f"{name}.{column}")


def test_a_folder_without_its_summary_is_told_of_where_nothing_else_was_kept(tmp_path):
    run("summary").save(tmp_path)
    (tmp_path / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"summary\.json missing"):
        Result.load(tmp_path)


@pytest.mark.parametrize("keep", FEWER)
def test_a_run_shows_the_same_figures_in_the_terminal_and_in_notebooks(keep):
    result = run(keep)
    assert class_table(result, "title").row_count == class_table(run("all"), "title").row_count
    assert repr(result) == repr(run("all"))
    assert result._repr_html_() == run("all")._repr_html_()


@pytest.mark.parametrize("keep", FEWER)
def test_what_needs_a_table_that_was_not_kept_says_which_keep_it_needs(keep):
    result = run(keep)
    for wants in (lambda: result.segments, lambda: check_result(result), lambda: worst_blocking(result)):
        with pytest.raises(ValueError, match=rf"made with keep={keep}, .* is kept with keep=all"):
            wants()
    if keep != "requests":
        with pytest.raises(ValueError, match=r"'requests' is kept with keep=all, or alone with keep=requests$"):
            ttft_cdf(result)


def test_the_requests_alone_draw_their_ttft():
    assert ttft_cdf(run("requests")).axes


def test_another_word_is_refused_with_near_ones():
    with pytest.raises(ValueError, match="unknown keep 'samples'; did you mean 'sample'"):
        run("samples")


@pytest.mark.parametrize("extra", ["report=plots", "report=html", "report=trace", "task=explain", "task=bound"])
def test_the_command_refuses_before_it_runs_what_needs_all_tables(extra, tmp_path, capsys):
    report = "report=none" if extra.startswith("task") else extra
    code = command("keep=summary", extra, report, "workload.num_requests=50", f"hydra.run.dir={tmp_path}")
    assert code == 2
    assert f"{extra} needs every table of the run, and keep=summary does not keep them" in capsys.readouterr().err
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("keep", FEWER)
def test_the_command_writes_what_was_kept_and_its_table(keep, tmp_path, capsys):
    assert command(f"keep={keep}", "report=none", "workload.num_requests=50", f"hydra.run.dir={tmp_path}") == 0
    assert {path.stem for path in tmp_path.glob("*.csv")} == set(KEPT[keep])
    assert "offered load" in capsys.readouterr().out


def test_all_is_what_a_run_keeps_if_nothing_is_said():
    result = checked(mixed(rate_rps=6.0, num_requests=50), POLICY, a100())
    assert result.run["keep"] == "all"
    assert set(result.tables) == set(KEPT["all"])


def command(*arguments: str) -> int:
    """The exit code of the command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["flowsim", *arguments])
        patch.setenv("HYDRA_FULL_ERROR", "0")  # the command sets it
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)
