"""The collector on a CPU: what it computes is right, what it measures can be resumed, fitted and simulated."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest

from flowsim.profile import read_profile
from flowsim.profiler import pause
from flowsim.profiler.__main__ import main
from flowsim.profiler.grid import GRIDS, Point, points
from flowsim.profiler.recording import Recording
from flowsim.profiler.trace import read_trace

ROOT = Path(__file__).parent.parent
LLAMA = {
    "model_type": "llama",
    "_name_or_path": "tiny-llama",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}
QWEN2 = LLAMA | {"model_type": "qwen2", "_name_or_path": "tiny-qwen2", "tie_word_embeddings": True}
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "_name_or_path": "tiny-moe",
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
IDENTITY = {"model": "m", "gpu": "g", "tp": 1, "software": "s", "source": "flowsim test"}
VALUES = {"latency_s": 1e-3, "repetitions": 5, "p10_s": 9e-4, "p90_s": 2e-3}


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="the collector needs torch: pip install 'flowsim-prefill[profiler]'")


def config(folder: Path, model: dict) -> Path:
    path = folder / f"{model['_name_or_path']}.json"
    path.write_text(json.dumps(model))
    return path


def run(*arguments: object) -> int:
    return main([str(one) for one in arguments])


def bench(folder: Path, model: dict, **changes):
    from flowsim.profiler.bench import open_bench
    from flowsim.profiler.models import load_shapes

    how = {"device": "cpu", "dtype": "fp32", "tp": 1, "gpu": "", "threads": 1, "layers": 2, "say": print} | changes
    return open_bench(load_shapes(str(config(folder, model))), **how)


# --- the grid: no torch


def test_any_beginning_of_the_grid_covers_every_operator_and_eight_points_of_each_come_first():
    names = ["qkv_gemm", "attention", "lm_head"]
    for grid in GRIDS.values():
        ordered = points(names, grid, max(grid.tokens))
        assert len(set(ordered)) == len(ordered)
        for name in names:
            first = [point for point in ordered[: 8 * len(names)] if point.operator == name]
            assert len({point.new_tokens + point.sequences for point in first}) == 8
            widest = [point.tokens + point.sequences for point in ordered if point.operator == name]
            assert max(point.tokens + point.sequences for point in first) == max(widest)


def test_the_coarse_points_of_an_operator_are_spread_over_its_range():
    grid = GRIDS["full"]
    first = sorted(point.new_tokens for point in points(["act"], grid, max(grid.tokens))[:6])
    assert (first[0], first[-1]) == (1, 16384)
    assert max(later / earlier for earlier, later in pairwise(first)) <= 16


def test_no_point_exceeds_the_tokens_that_are_allowed_in_a_pass_and_a_context():
    for point in points(["attention", "whole_layer"], GRIDS["full"].upto(2048), 2048):
        assert point.tokens <= 2048
        assert point.new_tokens + point.cached_tokens <= 2048


def test_a_limit_that_leaves_too_few_points_for_a_fit_is_refused():
    with pytest.raises(ValueError, match=r"--max-tokens 64 leaves 5 token counts; a fit needs 8"):
        GRIDS["full"].upto(64)


# --- the growing trace: no torch


def test_a_recording_is_a_valid_trace_after_every_row_and_finds_its_points_again(tmp_path):
    path, said = tmp_path / "trace.csv", []
    recording = Recording(path, IDENTITY, said.append)
    wanted = [Point("attention", 16, 64, 4), Point("lm_head", 0, sequences=8), Point("whole_prefill", 128)]
    for count, point in enumerate(wanted, start=1):
        recording.append(point, VALUES)
        assert len(read_trace(path)) == count
    assert said == []
    assert Recording(path, IDENTITY, said.append).done == set(wanted)
    assert said == [f"{path}: 3 points are there already; going on"]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_half_written_last_line_is_dropped_said_and_measured_again(tmp_path, cut):
    path, said = tmp_path / "trace.csv", []
    recording = Recording(path, IDENTITY, said.append)
    recording.append(Point("act", 1), VALUES)
    whole = path.read_bytes()
    recording.append(Point("act", 8), VALUES)
    path.write_bytes(path.read_bytes()[:-cut])
    again = Recording(path, IDENTITY, said.append)
    assert "the last line was cut off" in said[0]
    assert again.done == {Point("act", 1)}
    assert path.read_bytes() == whole
    again.append(Point("act", 8), VALUES)
    assert len(read_trace(path)) == 2


def test_a_file_cut_off_within_its_header_is_begun_anew(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("model,gpu,t")
    Recording(path, IDENTITY, print).append(Point("act", 1), VALUES)
    assert len(read_trace(path)) == 1


@pytest.mark.parametrize("key", ["model", "gpu", "tp", "software", "source"])
def test_a_trace_of_another_model_gpu_degree_or_software_is_not_appended_to(tmp_path, key):
    path = tmp_path / "trace.csv"
    Recording(path, IDENTITY, print).append(Point("act", 1), VALUES)
    with pytest.raises(ValueError, match=f"holds {key} .* give --out another file"):
        Recording(path, IDENTITY | {key: 2 if key == "tp" else "other"}, print)


def test_a_file_that_is_no_recording_is_left_as_it_is(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="not a trace that collect wrote"):
        Recording(path, IDENTITY, print)
    assert path.read_text() == "a,b\n1,2\n"
    with pytest.raises(ValueError, match=r"must be a \.csv file"):
        Recording(tmp_path / "trace.parquet", IDENTITY, print)


# --- without torch


@pytest.mark.parametrize("module", ["collect", "pause"])
def test_without_torch_the_commands_say_what_to_install(tmp_path, module):
    code = f"""
import sys
sys.modules["torch"] = None
from flowsim.profiler.__main__ import main
sys.exit(main(["{module}", "--model", "llama3-8b", "--out", "trace.csv"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'flowsim-prefill[profiler]'" in done.stderr
    assert "Traceback" not in done.stderr


# --- with torch, on a CPU


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [LLAMA, QWEN2, QWEN3_MOE], ids=lambda model: model["_name_or_path"])
@pytest.mark.usefixtures("torch")
def test_every_operator_computes_what_its_plain_definition_says(tmp_path, model, dtype):
    from flowsim.profiler.operators import check

    one = bench(tmp_path, model, dtype=dtype)
    for name in one.operators:
        if name in ("lm_head", "sampler"):
            check(one.model, Point(name, 0, sequences=5))
        else:
            for point in (Point(name, 1), Point(name, 33), Point(name, 7, 19, 3), Point(name, 16, 0, 2)):
                check(one.model, point)


@pytest.mark.usefixtures("torch")
def test_an_operator_that_computes_something_else_is_refused_by_name(tmp_path):
    from dataclasses import replace

    from flowsim.profiler.operators import check

    one = bench(tmp_path, LLAMA)
    wrong = replace(one.model.kernels.elementwise, act=lambda x: x.chunk(2, dim=-1)[1])
    one.model.use(replace(one.model.kernels, elementwise=wrong))
    with pytest.raises(ValueError, match=r"act on .* relative error"):
        check(one.model, Point("act", 16))


def test_prefilling_in_chunks_on_the_cache_gives_what_one_pass_gives(tmp_path, torch):
    one = bench(tmp_path, LLAMA)
    model = one.model
    with torch.inference_mode():
        prompt = model.draw.below(1000, 1, 48)
        whole = model.start(prompt)
        tokens = model.prefill(whole, prompt)
        rest = model.start(prompt[:, 32:], cached=32)
        for mine, theirs in zip(rest.caches, whole.caches, strict=True):
            for cache, full in zip(mine, theirs, strict=True):
                cache[:, :32] = full[:, :32]
        assert torch.equal(model.prefill(rest, prompt[:, 32:]), tokens)
        assert torch.allclose(rest.x, whole.x[32:], atol=1e-4)


@pytest.mark.usefixtures("torch")
def test_a_rank_of_two_holds_half_of_the_heads_and_columns_and_its_times_are_named_by_degree(tmp_path):
    one = bench(tmp_path, LLAMA, tp=2)
    layer = one.model.layers[0]
    assert layer.gate_up.shape == (256, 128)
    assert layer.o.shape == (128, 64)
    assert one.identity["tp"] == 2
    assert not any(name.startswith("all_reduce") for name in one.operators)


@pytest.mark.usefixtures("torch")
def test_the_trace_names_threads_format_and_kernels_and_the_shapes(tmp_path):
    one, other = bench(tmp_path, LLAMA), bench(tmp_path, LLAMA | {"intermediate_size": 512})
    assert "1 threads; float32; attention torch-sdpa; element-wise eager" in str(one.identity["software"])
    assert one.identity["source"] != other.identity["source"]


@pytest.mark.usefixtures("torch")
def test_a_steady_call_is_repeated_less_than_a_noisy_one_and_the_median_is_its_time():
    import torch

    from flowsim.profiler.timing import Ranks, Timer

    device = torch.device("cpu")
    timer = Timer(device, Ranks(device), spread=0.05, flush_bytes=1)
    draws = random.Random(1)
    steady = timer.measure(lambda: time.sleep(0.002), 60.0)
    noisy = timer.measure(lambda: time.sleep(draws.uniform(0.001, 0.02)), 60.0)
    assert steady.median_s == pytest.approx(0.002, rel=0.5)
    assert steady.p10_s <= steady.median_s <= steady.p90_s
    assert 10 <= steady.repetitions < noisy.repetitions <= 200
    assert timer.measure(lambda: time.sleep(draws.uniform(0.001, 0.02)), 0.0).repetitions == 5


@pytest.mark.usefixtures("torch")
def test_points_that_do_not_fit_in_memory_are_skipped_and_said(tmp_path, monkeypatch):
    from flowsim.profiler import measuring

    one, said = bench(tmp_path, LLAMA), []
    object.__setattr__(one, "say", said.append)
    recording = Recording(tmp_path / "trace.csv", one.identity, print)
    monkeypatch.setattr(measuring, "free_bytes", lambda _: 2**20)
    wanted = [Point("act", 8), Point("attention", 512, 0, 4)]
    count = measuring.measure_points(one, wanted, recording, time.monotonic() + 60, 0.5, lambda *_: None)
    assert (count.measured, count.skipped, count.left) == (1, 1, 0)
    assert said == ["skipped attention, 4 x 512 tokens: needs about 0.0 GiB, 0.0 GiB are free"]

    def fails(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(measuring, "prepare", fails)
    count = measuring.measure_points(one, [Point("act", 16)], recording, time.monotonic() + 60, 0.5, lambda *_: None)
    assert count.skipped == 1
    assert said[-1] == "skipped act, 16 tokens: the device ran out of memory"
    assert recording.done == {Point("act", 8)}


@pytest.mark.usefixtures("torch")
def test_a_collection_that_is_interrupted_goes_on_without_losing_or_repeating_points(tmp_path, capsys):
    out = tmp_path / "trace.csv"
    arguments = ["--config", config(tmp_path, LLAMA), "--device", "cpu", "--threads", "1", "--grid", "small"]
    command = [sys.executable, "-m", "flowsim.profiler", "collect", *arguments, "--out", out]
    process = subprocess.Popen([str(one) for one in command], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            if out.exists() and out.read_bytes().count(b"\n") > 10:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
    before = read_trace(out)
    assert run("collect", *arguments, "--minutes", "0.03", "--spread", "0.5", "--out", out) == 0
    after = read_trace(out)
    assert len(after) > len(before)
    pd.testing.assert_frame_equal(after.iloc[: len(before)], before)
    keys = ["operator", "new_tokens", "cached_tokens", "batch", "sequences"]
    assert not after.duplicated(keys).any()
    printed = capsys.readouterr()
    assert f"tiny-llama on cpu, tp 1: {len(after)} points in {out}" in printed.out
    assert "the time budget ended first" in printed.err


@pytest.mark.usefixtures("torch")
def test_an_impossible_request_is_one_line_on_stderr(tmp_path, capsys):
    path = config(tmp_path, LLAMA)
    out = ["--out", tmp_path / "trace.csv"]
    assert run("collect", "--config", path, "--device", "cpu", "--tp", "3", *out) == 2
    assert "4 query heads, which do not divide among 3 ranks" in capsys.readouterr().err
    assert run("collect", "--model", "llama3-8", "--device", "cpu", *out) == 2
    assert "llama3-8b" in capsys.readouterr().err


@pytest.mark.usefixtures("torch")
def test_paused_prefills_end_as_undisturbed_ones_and_are_blocked_for_less_than_a_prefill(tmp_path, capsys):
    out = tmp_path / "pause.json"
    how = ["--device", "cpu", "--threads", "1", "--tokens", "512", "--urgent-tokens", "16", "--trials", "12"]
    assert run("pause", "--config", config(tmp_path, LLAMA), *how, "--out", out) == 0
    assert "operator: 12 of 12 paused prefills ended exactly as undisturbed ones" in capsys.readouterr().out
    report = json.loads(out.read_text())
    for name in ("operator", "block", "layer"):
        trials = report["trials"][name]
        assert len(trials) == 12
        assert all(trial["unchanged"] for trial in trials)
        assert all(0.0 < trial["blocked_s"] < 5.0 for trial in trials)
        assert all(0.0 <= trial["predicted_operators_s"] < 5.0 for trial in trials)


@pytest.mark.usefixtures("torch")
def test_a_residual_is_the_time_to_the_next_legal_stop_of_the_timeline():
    from flowsim.profiler.preemption import Trial
    from flowsim.timeline import Pass, Stops, Timeline

    timeline = Timeline([Pass(1, 0.5, (1.0, 2.0, 3.0, 4.0, 5.0), 2, 0.25)])
    trials = [Trial(raised_s=raised_s, blocked_s=0.1, unchanged=True) for raised_s in (0.0, 1.75, 10.6, 99.0)]
    assert pause.residuals_s(timeline, Stops.OPERATOR, trials) == pytest.approx([1.5, 0.75, 0.15, 0.0])
    assert pause.residuals_s(timeline, Stops.LAYER, trials) == pytest.approx([5.5, 3.75, 0.15, 0.0])


@pytest.mark.slow
@pytest.mark.usefixtures("torch")
def test_two_processes_measure_all_reduces_together(tmp_path):
    out = tmp_path / "trace.csv"
    how = ["--device", "cpu", "--threads", "1", "--tp", "2", "--grid", "small", "--minutes", "0.3", "--check-cost"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "flowsim.profiler", "collect", "--config", config(tmp_path, LLAMA), *how, "--out", out]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([str(one) for one in command], env=environment, check=True, capture_output=True)
    trace = read_trace(out)
    assert {"all_reduce_attention", "all_reduce_mlp"} <= set(trace["operator"])
    assert set(trace["tp"]) == {2}


@pytest.mark.slow
@pytest.mark.usefixtures("torch")
def test_a_tiny_model_is_collected_fitted_and_simulated_within_two_minutes(tmp_path):
    began_s, out = time.monotonic(), tmp_path / "cpu"
    how = ["--config", config(tmp_path, LLAMA), "--device", "cpu", "--threads", "1", "--grid", "small"]
    script = [
        sys.executable,
        "-m",
        "experiments.profile_gpu",
        *how,
        "--minutes",
        "0.5",
        "--pause-tokens",
        "512",
        "--pause-trials",
        "20",
    ]
    printed = shell([*script, "--out", out], ROOT)
    assert "20 of 20 paused prefills ended exactly as undisturbed ones" in printed
    costs = json.loads((out / "trace.checks.json").read_text())
    assert {cost["stops"] for cost in costs["costs"]} == {"operator", "block", "layer"}
    rows = read_trace(out / "trace.csv")
    assert {"whole_prefill", "check_sync_operator", "check_sync_block", "check_sync_layer"} <= set(rows["operator"])
    profile = read_profile(out / "profile.yaml")
    assert (profile.model, profile.gpu, profile.layers) == ("tiny-llama", "cpu", 2)
    assert profile.check_s == pytest.approx(costs["check_s"])
    workload = ["workload=uniform", "workload.num_requests=50", "workload.ttft_slo_s=1"]
    command = [sys.executable, "-m", "flowsim", "model=tiny-llama", f"gpu={out / 'profile.yaml'}", *workload]
    assert "50" in shell(command, tmp_path)
    assert time.monotonic() - began_s < 120.0


def shell(command: list[object], folder: Path) -> str:
    done = subprocess.run([str(one) for one in command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
