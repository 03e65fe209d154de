"""The timeline trace: what is in the file; `test_report_browser.py` has Perfetto read it."""

from __future__ import annotations

import gzip
import json
import logging
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from toys import checked, toy_latency, workload

from flowsim import Alone, ComposedPolicy, PrefillOnly, Request, Result, SLOAware, TokenBudget, simulate
from flowsim.check import check_result
from flowsim.config import build, compose
from flowsim.pool import Cluster
from flowsim.report import Full, Html, Trace, trace
from flowsim.report.series import busy, counted, last_s, peaks, shares, suspended, waiting
from flowsim.report.story import Chronicle
from flowsim.workload import mixed


def run(policy: ComposedPolicy | None = None, **options: int) -> Result:
    latency = toy_latency(3e-4, layers=4, pass_s=0.007, request_s=0.0045, check_s=2e-5, switch_s=3e-4)
    policy = policy or ComposedPolicy("slack_edf", SLOAware(2048), "operator")
    requests = mixed(rate_rps=4, num_requests=200, seed=3)
    return simulate(requests, policy=policy, latency=latency, cluster=PrefillOnly(**options))


def read(path: Path) -> dict:
    return json.loads(gzip.decompress(path.read_bytes()))


def events(result: Result, folder: Path, window_s: list[float] | None = None) -> list[dict]:
    (path,) = Trace(window_s).write(result, folder, "a title")
    return read(path)["traceEvents"]


def test_every_segment_flag_arrival_and_first_token_is_a_slice_and_slices_of_a_thread_never_cross(tmp_path):
    result = run(instances=2)
    found = events(result, tmp_path)
    slices = [one for one in found if one["ph"] == "X"]
    segments, flags, requests = result.tables["segments"], result.tables["preemptions"], result.tables["requests"]
    switches = int((segments["switch_s"] > 0).sum())
    assert switches > 0
    assert len(slices) == len(segments["batch"]) + switches + len(flags["by"]) + 2 * len(requests["id"])
    by_thread = defaultdict(list)
    for one in slices:
        by_thread[one["pid"], one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
    assert len(by_thread) == 8
    for spans in by_thread.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        for (start, end), (later, its_end) in pairwise(spans):
            assert later >= end or (start <= later and its_end <= end)
    busy_us = sum(one["dur"] for one in slices if "operators" in one["name"])
    assert busy_us / 1e6 == pytest.approx((segments["end_s"] - segments["start_s"]).sum(), abs=1e-3)


@pytest.mark.parametrize(
    ("overrides", "name", "said"),
    [
        (["policy=adaptive_stops"], "stops", lambda row: row.stops),
        (
            ["policy=layered_prefill", "cluster=colocated"],
            "layers",
            lambda row: f"{row.first_layer}-{row.last_layer - 1}",
        ),
    ],
)
def test_a_segment_tells_the_layers_and_the_stops_that_its_batch_has_of_its_own(overrides, name, said, tmp_path):
    setup = build(compose([*overrides, "workload.num_requests=60"]))
    result = setup.run()
    check_result(result, Cluster.of(setup.cluster).hardware(setup.latency))
    told = [one["args"] for one in events(result, tmp_path) if name in one.get("args", {})]
    rows = pd.DataFrame(result.tables[name]).itertuples()
    assert {args["batch"]: args[name] for args in told} == {row.batch: said(row) for row in rows}
    assert len({args[name] for args in told}) > 1


def test_an_arrow_leads_from_every_arrival_over_the_segments_to_the_first_token(tmp_path):
    result = run()
    flows = defaultdict(list)
    for one in events(result, tmp_path):
        if one["ph"] in "stf":
            flows[one["id"]].append((one["ts"], one["ph"]))
    requests = result.tables["requests"]
    assert sorted(flows) == requests["id"].tolist()
    for request, points in flows.items():
        phases = "".join(phase for _, phase in points)
        assert (phases[0], set(phases[1:-1]), phases[-1]) == ("s", {"t"}, "f")
        assert points == sorted(points, key=lambda point: point[0])
        assert points[0][0] == round(requests["arrival_s"][request] * 1e6)
        assert points[-1][0] == round(requests["first_token_s"][request] * 1e6)


def test_queue_and_suspension_are_paired_and_counters_end_where_they_began(tmp_path):
    result = run(ComposedPolicy("arrival", TokenBudget(512), "pass"))
    open_slices, counters = {}, {}
    for one in events(result, tmp_path):
        if one["ph"] == "b":
            open_slices[one["cat"], one["id2"]["local"]] = one["ts"]
        elif one["ph"] == "e":
            assert open_slices.pop((one["cat"], one["id2"]["local"])) <= one["ts"]
        elif one["ph"] == "C":
            counters.setdefault(one["name"], []).append((one["ts"], one["args"]))
    assert open_slices == {}
    assert {name: values[-1][1] for name, values in counters.items() if name in ("queue length", "KV blocks")} == {
        "queue length": {"requests": 0},
        "KV blocks": {"running": 0, "suspended": 0},
    }
    assert counters["decisions"][-1][1] == {"started": result.summary()["batches"]["count"], "resumed": 0, "flagged": 0}
    assert {"queue length", "KV blocks", "decisions", "slack of the running head [s]"} == set(counters)
    for values in counters.values():
        assert [at for at, _ in values] == sorted({at for at, _ in values})


def test_the_slack_of_what_runs_is_its_deadline_less_the_first_token_that_it_then_has(tmp_path):
    policy = ComposedPolicy("deadline", Alone(), "operator")
    result = checked(workload((0.0, 100, 500.0), (15.0, 10, 30.0)), policy, toy_latency())
    slack = [one["args"] for one in events(result, tmp_path) if one["ph"] == "X" and "operators" in one["name"]]
    assert [one["slack [s]"] for one in slack] == pytest.approx([400.0, 15.0, 390.0])  # 10 s suspended


def test_a_window_holds_only_what_overlaps_it_and_cuts_the_queue_to_it(tmp_path):
    result = run()
    whole, part = events(result, tmp_path), events(result, tmp_path, [10.0, 14.0])
    assert 0 < len(part) < len(whole) / 4
    for one in part:
        if one["ph"] == "X":
            assert one["ts"] + one["dur"] >= 10e6 - 1
        if one["ph"] in "beC":
            assert 10e6 <= one["ts"] <= 14e6
    operators = [one["name"] for one in part if one["ph"] == "X" and "operators" in one["name"]]
    segments = result.tables["segments"]
    assert len(operators) == ((segments["end_s"] >= 10) & (segments["start_s"] <= 14)).sum()


@pytest.mark.parametrize(
    ("window_s", "complaint"),
    [
        ([10], "must be two seconds, as in report.window_s="),
        ("10,20", "must be two seconds"),
        ([20, 10], "must begin at 0 s or later, and end after that"),
        ([-1, 10], r"report.window_s is \[-1,10\]"),
        ([0, float("inf")], "and end after that"),
    ],
)
def test_a_window_that_is_none_is_refused(window_s, complaint):
    with pytest.raises(ValueError, match=complaint):
        Trace(window_s)


def test_a_run_too_large_for_a_viewer_is_cut_off_with_a_message(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trace, "MOST_POINTS", 100)
    caplog.set_level(logging.INFO, "flowsim")
    result = run()
    (path,) = Trace().write(result, tmp_path, "a title")
    shown = read(path)["otherData"]
    assert 0 < shown["to_s"] < 30 < last_s(result.tables)
    assert "another part: report.window_s=[" in caplog.text


@pytest.mark.parametrize(
    "requests",
    [
        [],
        [Request(id=0, arrival_s=0.0, prompt_tokens=5)],
        [Request(id=0, arrival_s=0.0, prompt_tokens=900_000)],
        [Request(id=row, arrival_s=1.0, prompt_tokens=5, slo_class='a "quoted\\" naïve\nclass') for row in range(3)],
    ],
    ids=["no request", "no SLO", "all rejected", "an odd class"],
)
def test_odd_runs_have_a_trace_too(requests, tmp_path):
    policy = ComposedPolicy("arrival", Alone(), "request")
    result = simulate(requests, policy=policy, latency=toy_latency(), cluster=PrefillOnly(kv_blocks=10))
    found = events(result, tmp_path)
    assert sum(one["ph"] == "X" for one in found) == len(requests) + 2 * result.summary()["batches"]["count"]
    assert not any(one.get("name", "").startswith("slack") for one in found)


def test_the_same_run_gives_the_same_bytes_and_a_loaded_result_too(tmp_path):
    result = run()
    result.save(tmp_path / "saved")
    first, again = tmp_path / "first", tmp_path / "again"
    for folder in (first, again):
        folder.mkdir()
    Trace().write(result, first, "a title")
    Trace().write(Result.load(tmp_path / "saved"), again, "a title")
    assert (first / "trace.json.gz").read_bytes() == (again / "trace.json.gz").read_bytes()


def test_report_trace_is_chosen_on_the_command_line_with_a_window():
    from flowsim.config import make

    config = compose(["report=trace", "report.window_s=[1,2]"])
    build(config)
    assert make(config, "report").window_s == (1.0, 2.0)


def test_queue_length_suspension_and_use_over_time_agree_with_the_requests_own_times():
    result = run(ComposedPolicy("slack_edf", Alone(), "operator"))
    tables, edges_s = result.tables, [0.0, last_s(result.tables)]
    requests, summary = tables["requests"], result.summary()
    queue, parked = waiting(tables), suspended(tables)
    assert (queue.end_s - queue.start_s).sum() == pytest.approx(requests["queued_s"].sum())
    assert (parked.end_s - parked.start_s).sum() == pytest.approx(requests["suspended_s"].sum())
    assert shares(busy(tables), edges_s)[0] == pytest.approx(summary["utilisation"])
    steps = counted(queue)
    assert steps.values.min() == steps.values[-1] == 0
    halves_s = [edges_s[0], edges_s[1] / 2, edges_s[1]]
    assert peaks(steps, halves_s).max() == peaks(steps, edges_s)[0] == steps.values.max()


def decoding() -> Result:
    """A run whose requests decode after their first token, with a table of steps, transfers, and an eviction."""
    result = run()
    tables = {name: dict(table) for name, table in result.tables.items()}
    requests, segments, batches = tables["requests"], tables["segments"], tables["batches"]
    end_s, new = last_s(tables), int(batches["batch"].max()) + 1
    added = {"batch": new, "start_s": end_s, "end_s": end_s + 1.0, "first_op": 0, "last_op": 0, "ended": "finished"}
    again = {**added, "batch": new + 1, "start_s": end_s + 1.0, "end_s": end_s + 1.5}
    for one in (added, again):
        for name, column in segments.items():
            segments[name] = np.append(column, np.array([one.get(name, 0)], dtype=column.dtype))
    for name, column in batches.items():  # request 7 is computed again after its first token
        value = {"batch": new + 1, "request": 7, "tokens": 100}.get(name, 0)
        batches[name] = np.append(column, np.array([value], dtype=column.dtype))
    requests["finish_s"] = requests["finish_s"] + 2.0
    requests["transfer_start_s"] = requests["first_token_s"] + 0.001
    requests["transfer_end_s"] = requests["first_token_s"] + 0.002
    for name in ("cached_tokens", "evictions", "recomputed_tokens"):
        requests[name] = np.zeros(len(requests["id"]), dtype=np.int64)
    tables["steps"] = {"batch": np.array([new]), "decodes": np.array([5]), "steps": np.array([50])}
    return Result(tables, result.run)


def test_decodes_transfers_and_what_is_computed_again_have_a_place_and_no_arrow(tmp_path):
    result, before = decoding(), run()
    found = events(result, tmp_path)
    names = [one["name"] for one in found if one["ph"] == "X"]
    assert names.count("decode 5") == 1
    assert sum(one["ph"] == "b" and one["cat"] == "transfer" for one in found) == len(result.tables["requests"]["id"])
    points = [one for one in found if one["ph"] in "stf"]
    assert len(points) == sum(one["ph"] in "stf" for one in events(before, tmp_path))
    queue = waiting(result.tables)
    assert (queue.end_s - queue.start_s).sum() == pytest.approx(before.tables["requests"]["queued_s"].sum())


def test_a_story_ends_with_the_first_token_and_decodes_are_nobody_to_wait_behind():
    result, before = decoding(), run()
    chronicle = Chronicle(result)
    assert chronicle.story(7) == Chronicle(before).story(7)
    end_s = last_s(before.tables)
    ((served),) = chronicle.served(0, end_s, end_s + 0.5)
    assert (served.request, served.seconds) == (None, pytest.approx(0.5))


def test_a_page_on_a_run_that_decodes_is_written(tmp_path):
    (path,) = Html().write(decoding(), tmp_path, "a on b")
    assert "decoded_s" in path.read_text(encoding="utf-8")


def test_every_report_of_a_colocated_run_with_evictions_is_written(tmp_path):
    overrides = ["cluster=colocated", "policy=vllm", "workload=azure_conv", "cluster.kv_blocks=1500"]
    result = build(compose([*overrides, "workload.num_requests=150", "workload.rate_rps=8"])).run()
    assert result.tables["requests"]["evictions"].sum() > 0
    names = [path.name for path in Full().write(result, tmp_path, "a on b")]
    assert names == ["ttft.png", "tbt.png", "worst_blocking.png", "trace.json.gz", "report.html"]
    chronicle, requests = Chronicle(result), result.tables["requests"]
    for row in range(150):
        spells_s = sum(spell.length_s for spell in chronicle.story(row).spells)
        assert spells_s == pytest.approx(requests["ttft_s"][row] - result.run["request_s"])
