"""Studies: what is asked for is what is run, once, and what comes out is tidy."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest

import flowsim
from flowsim import Batch, Part, Stops
from flowsim.config import build, compose
from flowsim.study import StudyError, StudyWarning
from flowsim.study.attained import confidence, crossing, shares, worst
from flowsim.study.search import Search

SMALL = ["workload.num_requests=150"]
ONE = {"jobs": 1}


class FirstFit:
    """First come, first served, alone."""

    stops = Stops.REQUEST

    def select(self, view):
        if view.running is not None:
            return view.running
        fitting = (job for job in view.waiting if view.fits([Part(job, job.left_tokens)]))
        job = next(fitting, None)
        return None if job is None else Batch([Part(job, job.left_tokens)])


class Broken:
    """Fails when it is first asked."""

    stops = Stops.REQUEST

    def select(self, view):
        raise RuntimeError("no idea what to run")


def test_importing_flowsim_does_not_import_what_only_studies_need():
    code = "import flowsim, sys; print({'hydra', 'joblib', 'pandas', 'flowsim.study'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_cell_of_a_sweep_is_the_run_that_the_command_would_do():
    table = flowsim.sweep(
        SMALL, {"policy": ["fcfs", "flowprefill"], "workload.rate_rps": [3, 9.0]}, seeds=(0, 4), **ONE
    )
    assert list(zip(table.policy, table["workload.rate_rps"], table.seed, strict=True))[:4] == [
        ("fcfs", 3, 0), ("fcfs", 3, 4), ("fcfs", 9.0, 0), ("fcfs", 9.0, 4),
    ]  # fmt: skip
    for row in table.to_dict("records"):
        overrides = [f"policy={row['policy']}", f"workload.rate_rps={row['workload.rate_rps']}", f"seed={row['seed']}"]
        alone = build(compose([*SMALL, *overrides])).run().summary()
        assert row["attainment"] == alone["attainment"]
        assert row["ttft_s.p99"] == alone["ttft_s"]["p99"]
        assert row["preemptions.count"] == alone["preemptions"]["count"]
    assert table.error.isna().all()
    assert set(table["policy.stops"]) == {"request", "operator"}
    assert set(table["workload.num_requests"]) == {150}


def test_the_number_of_workers_changes_no_figure():
    def figures(jobs):
        table = flowsim.sweep(SMALL, {"policy": ["fcfs", "flowprefill", "chunked_2k"]}, seeds=range(3), jobs=jobs)
        return table[["policy", "seed", "attainment", "ttft_s.mean", "events_per_request"]]

    assert figures(1).equals(figures(2))


def test_a_policy_object_stands_for_a_configured_one():
    table = flowsim.sweep(SMALL, {"policy": {"own": FirstFit(), "fcfs": "fcfs"}}, **ONE)
    assert list(table.policy) == ["own", "fcfs"]
    assert table["ttft_s.mean"][0] == table["ttft_s.mean"][1]
    assert table["policy.order"][0] is None or table["policy.order"].isna()[0], "it has no setting of another policy"


def test_a_workload_function_and_a_latency_model_stand_for_configured_ones():
    from dataclasses import replace

    profile = flowsim.load_profile("llama3-8b", "a100")
    slow = flowsim.LatencyModel(replace(profile, request_s=profile.request_s + 1.0))
    latencies = {"shipped": flowsim.LatencyModel(profile), "slow": slow}
    grid = {"workload": {"even": even}, "latency": latencies, "workload.rate_rps": [1.0, 2.0]}
    table = flowsim.sweep(["policy=fcfs", *SMALL], grid, **ONE)
    assert list(table["requests"]) == [150] * 4
    assert np.allclose(table.rate_rps, table["workload.rate_rps"])
    by = table.set_index(["latency", "workload.rate_rps"])["ttft_s.mean"]
    assert by["slow", 1.0] - by["shipped", 1.0] == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"workload\.slo_scale"):
        flowsim.slo_scale([], {"workload": {"even": even}}, **ONE)


def even(*, rate_rps, num_requests=20):
    """Equal prompts at equal gaps."""
    return [
        flowsim.Request(id=row, arrival_s=row / rate_rps, prompt_tokens=1000, ttft_slo_s=1.0)
        for row in range(num_requests)
    ]


def test_an_axis_of_ones_own_maps_labels_to_overrides():
    grid = {"system": {"by one": ["policy=fcfs"], "small": {"policy": "chunked_2k", "policy.batching.tokens": 256}}}
    table = flowsim.sweep(SMALL, grid, **ONE)
    assert list(table.system) == ["by one", "small"]
    assert list(table.policy) == ["fcfs", "chunked_2k"]
    assert table["policy.batching.tokens"][1] == 256


def test_figures_of_ones_own_stand_beside_the_summarys():
    def queued(result):
        return {"queued_s": {"max": result.requests.queued_s.max()}, "count": np.int64(len(result.requests))}

    table = flowsim.sweep(SMALL, {"policy": ["fcfs"]}, measure=queued, **ONE)
    assert table["count"][0] == 150
    assert 0.0 < table["queued_s.max"][0] < 1000.0


MISTAKES = {
    "'fcfs'": lambda: flowsim.sweep(SMALL, {"policy": ["fcsf"]}),
    "workload.rate_rps": lambda: flowsim.sweep(SMALL, {"workload.rte_rps": [1]}),
    "'policy'": lambda: flowsim.sweep(SMALL, {"polcy": ["fcfs"]}),
    "above 0 and at most 1": lambda: flowsim.goodput(SMALL, target=1.2),
    "at least one seed": lambda: flowsim.goodput(SMALL, seeds=[]),
    "different whole numbers": lambda: flowsim.sweep(SMALL, seeds=[0, 0]),
    "must be a list": lambda: flowsim.sweep("policy=fcfs"),
    "no values": lambda: flowsim.sweep(SMALL, {"policy": []}),
    "two cells": lambda: flowsim.sweep(SMALL, {"policy": [FirstFit(), FirstFit()]}),
    "'loky'": lambda: flowsim.sweep(SMALL, backend="lokky"),
    "jobs is 0": lambda: flowsim.sweep(SMALL, jobs=0),
    "precision": lambda: flowsim.goodput(SMALL, precision=0),
    "bracket": lambda: flowsim.goodput(SMALL, low_rps=5, high_rps=2),
    "closed loop": lambda: flowsim.goodput(["workload=closed_loop"]),
    "has an SLO": lambda: flowsim.goodput([*SMALL, "workload.slo=none"], **ONE),
    "at least two": lambda: flowsim.compare(SMALL),
    "'chunked_2k'": lambda: flowsim.compare(SMALL, {"policy": ["fcfs", "chunked_2k"]}, baseline="chunked_3k"),
    "'ttft_s.p99'": lambda: flowsim.compare(SMALL, {"policy": ["fcfs", "edf"]}, figures=["ttft_s.p9"], **ONE),
    "numbers above 0": lambda: flowsim.slo_scale(SMALL, scales=[0.5, -1]),
}


@pytest.mark.parametrize("offered", MISTAKES)
def test_a_mistake_is_named_beside_what_is_near_or_allowed(offered):
    with pytest.raises(ValueError) as caught:
        MISTAKES[offered]()
    assert offered in str(caught.value)


def test_runs_that_fail_are_listed_with_their_error_and_the_others_are_kept():
    with pytest.warns(StudyWarning, match="2 of 4 runs failed.*no idea what to run"):
        table = flowsim.sweep(SMALL, {"policy": {"broken": Broken(), "fcfs": "fcfs"}}, seeds=(0, 1), **ONE)
    assert list(table.error.isna()) == [False, False, True, True]
    assert "no idea what to run" in table.error[0]
    assert table.attainment.notna().tolist() == [False, False, True, True]


def test_a_study_of_which_no_run_ends_says_why():
    with pytest.raises(StudyError, match="no idea what to run"):
        flowsim.sweep(SMALL, {"policy": [Broken()]}, **ONE)


RAN = []


def counted(result):
    RAN.append(result)
    return {}


def test_a_rerun_does_only_what_is_missing(tmp_path):
    RAN.clear()

    def study(rates):
        options = {"folder": tmp_path, "measure": counted, **ONE}
        return flowsim.sweep(SMALL, {"workload.rate_rps": rates}, seeds=(0, 1), **options)

    first = study([2.0, 4.0])
    assert len(RAN) == 4
    lines = (tmp_path / "points.jsonl").read_text().splitlines()
    assert len(lines) == 4
    (tmp_path / "points.jsonl").write_text("\n".join(lines[:3]) + "\n" + lines[3][:40])  # cut short by a full disk
    again = study([2.0, 4.0, 8.0])
    assert len(RAN) == 4 + 1 + 2
    assert again[again["workload.rate_rps"] < 8]["ttft_s.mean"].tolist() == first["ttft_s.mean"].tolist()
    assert all(json.loads(line)["figures"] for line in (tmp_path / "points.jsonl").read_text().splitlines())


@pytest.mark.parametrize("answer", [0.3, 1.0, 7.77, 40.0])
def test_a_search_ends_within_its_precision_of_where_the_claim_stops_to_hold(answer):
    search = Search(low=0.1, high=100.0, start=4.0, precision=0.01)
    tried = 0
    while (value := search.ask()) is not None:
        left, tried = search.left, tried + 1
        search.tell(value, holds=value <= answer)
        assert search.left < left or not (search.held and search.failed)
    assert search.end is None
    assert search.held <= answer < search.failed <= search.held * 1.01
    assert tried <= 14


@pytest.mark.parametrize(("answer", "end"), [(0.01, "low"), (1e9, "high")])
def test_a_search_says_which_end_it_hit(answer, end):
    search = Search(low=0.1, high=100.0, start=4.0)
    while (value := search.ask()) is not None:
        search.tell(value, holds=value <= answer)
    assert search.end == end
    assert (search.held, search.failed) == ((100.0, None) if end == "high" else (None, 0.1))


def test_goodput_is_the_highest_rate_tried_that_keeps_the_target():
    found = flowsim.goodput(SMALL, {"policy": ["fcfs", "flowprefill"]}, seeds=(0, 1), precision=0.05, **ONE)
    runs = found.evaluations.groupby(["policy", "workload.rate_rps"]).attainment.mean()
    for row in found.table.itertuples():
        kept = runs[row.policy][runs[row.policy] >= 0.9]
        broken = runs[row.policy][runs[row.policy] < 0.9]
        assert row.goodput_rps == kept.index.max()
        assert row.goodput_rps < broken.index.min() <= 1.05 * row.goodput_rps
        assert row.attained == kept[row.goodput_rps] >= 0.9
        assert math.isnan(row.goodput_rps_low) or row.goodput_rps_low < row.goodput_rps < row.goodput_rps_high
        assert (row.num_requests, row.seeds, row.bracket_end) == (150, 2, None)
    fcfs, flowprefill = found.table.goodput_rps
    assert flowprefill > 1.5 * fcfs


def test_a_cells_goodput_does_not_depend_on_the_other_cells():
    options = {"seeds": (0, 1), "precision": 0.05, **ONE}
    alone = flowsim.goodput(SMALL, {"policy": ["fcfs"]}, **options).table
    beside = flowsim.goodput(SMALL, {"policy": ["flowprefill", "fcfs"]}, **options).table
    assert alone.goodput_rps[0] == beside.goodput_rps[1]


def test_goodput_says_so_where_an_end_of_the_bracket_was_hit():
    low = flowsim.goodput(SMALL, seeds=(0,), low_rps=50, high_rps=60, **ONE).table.iloc[0]
    high = flowsim.goodput(SMALL, seeds=(0,), low_rps=0.5, high_rps=1, **ONE).table.iloc[0]
    assert (low.bracket_end, high.bracket_end) == ("low", "high")
    assert math.isnan(low.goodput_rps)
    assert high.goodput_rps == 1.0


def test_goodput_by_class_is_no_higher_than_goodput_overall():
    options = {"seeds": (0,), "precision": 0.05, **ONE}
    overall, by_class = (flowsim.goodput(SMALL, per_class=flag, **options).table.iloc[0] for flag in (False, True))
    assert by_class.goodput_rps <= overall.goodput_rps


def test_the_strictest_scale_meets_the_target_and_a_stricter_one_does_not():
    found = flowsim.slo_scale(["workload.rate_rps=2", *SMALL], {"policy": ["fcfs", "flowprefill"]}, seeds=(0, 1), **ONE)
    fcfs, flowprefill = found.table.slo_scale
    assert flowprefill < fcfs
    for name, strictest in (("fcfs", fcfs), ("flowprefill", flowprefill)):
        curve = found.curve[found.curve.policy == name].set_index("workload.slo_scale").attained
        assert curve[strictest] >= 0.9
        tighter = curve[curve.index < strictest]
        assert tighter.iloc[-1] < 0.9
        assert strictest / tighter.index.max() <= 1.01
        assert set(curve.index) >= {0.25, 0.5, 1.0, 4.0}


def test_scales_that_all_hold_or_all_fail_are_said_to():
    loose = flowsim.slo_scale(SMALL, scales=[50, 100], seeds=(0,), **ONE).table.iloc[0]
    strict = flowsim.slo_scale(SMALL, scales=[0.001, 0.002], seeds=(0,), **ONE).table.iloc[0]
    assert (loose.bracket_end, loose.slo_scale) == ("strictest", 50.0)
    assert strict.bracket_end == "loosest"
    assert math.isnan(strict.slo_scale)


def test_differences_are_paired_by_seed_and_a_policy_differs_from_itself_by_nothing():
    same = {"once": ["policy=fcfs"], "again": ["policy=fcfs"], "flowprefill": ["policy=flowprefill"]}
    found = flowsim.compare(SMALL, {"which": same}, seeds=range(4), **ONE)
    table = found.table.set_index(["which", "figure"])
    assert (table.loc["again"][["difference", "difference_low", "difference_high"]] == 0.0).all(axis=None)
    runs = found.evaluations.pivot(index="seed", columns="which", values="attainment")
    differences = runs.flowprefill - runs.once
    row = table.loc["flowprefill", "attainment"]
    assert row.difference == pytest.approx(differences.mean())
    half = 3.182446305 * differences.std(ddof=1) / 2.0  # t with three degrees of freedom, from a table
    assert (row.difference_low, row.difference_high) == pytest.approx(
        (differences.mean() - half, differences.mean() + half)
    )


def test_an_interval_needs_two_seeds_that_differ():
    assert confidence(2.0, [2.0]) is None
    assert confidence(2.0, [2.0, 2.0, 2.0]) is None
    assert confidence(2.0, [2.0, None, 2.1]) is None
    low, high = confidence(2.0, [1.9, 2.0, 2.1])
    assert low < 2.0 < high
    assert low * high == pytest.approx(4.0)


def test_attainment_crosses_where_a_line_in_the_logarithm_does():
    assert crossing({1.0: 1.0, 4.0: 0.8}, 0.9) == pytest.approx(2.0)
    assert crossing({1.0: 0.8, 4.0: 0.7}, 0.9) is None
    assert crossing({1.0: 1.0, 4.0: 0.95}, 0.9) is None
    assert worst([{"a": 1.0, "b": 0.5}, {"a": 0.6}]) == 0.5
    assert shares({"attainment": 0.7, "attainment_by_class.x": None, "attainment_by_class.y": 0.4}, "attainment",
                  per_class=True) == {"y": 0.4}  # fmt: skip
