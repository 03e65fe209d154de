"""The profiler's command: from a trace to a profile, its report and a simulation; the list and one profile."""

from __future__ import annotations

import pandas as pd
import pytest
import yaml

from flowsim import Alone, ComposedPolicy, LatencyModel, Request, load_profile, simulate
from flowsim.profile import read_profile
from flowsim.profiler.__main__ import main
from flowsim.profiler.trace import read_trace, write_trace

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
OPERATORS = ("embedding", "input_norm", "qkv_gemm", "rope", "o_proj_gemm", "gate_up_gemm", "act", "down_gemm")


def seconds(operator, n):
    return (10e-6 + 0.05e-6 * n) * (1 + OPERATORS.index(operator))


@pytest.fixture
def trace(tmp_path):
    """A clean trace of every operator of Llama-3-8B on an H100, with one measured total, and its file."""
    row = {"model": "llama3-8b", "gpu": "h100", "tp": 1, "cached_tokens": 0, "batch": 1, "statistic": "median"}
    row |= {"repetitions": 5, "software": "toy 1.0", "source": "toy clock"}
    rows = [
        row | {"operator": operator, "new_tokens": n, "latency_s": seconds(operator, n)}
        for operator in OPERATORS
        for n in TOKENS
    ]
    rows += [
        row
        | {"operator": "attention", "new_tokens": n, "cached_tokens": p, "latency_s": 8e-6 + 3e-11 * n * (n + 2 * p)}
        for n in TOKENS
        for p in (0, 1024)
    ]
    layer_s = sum(seconds(operator, 2048) for operator in OPERATORS[1:]) + 8e-6 + 3e-11 * 2048**2
    whole_s = seconds("embedding", 2048) + 32 * layer_s
    rows.append(row | {"operator": "whole_prefill", "new_tokens": 2048, "latency_s": 1.1 * whole_s})
    path = tmp_path / "trace.csv"
    write_trace(pd.DataFrame(rows), path)
    return path


def test_a_trace_becomes_a_profile_a_report_and_a_simulation(trace, tmp_path, capsys):
    out, report = tmp_path / "mine.yaml", tmp_path / "report"
    assert main(["fit", str(trace), "--out", str(out), "--report", str(report), "--check-s", "0.00001"]) == 0
    assert capsys.readouterr().err == ""
    profile = load_profile("llama3-8b", str(out))
    assert (profile.layers, profile.check_s, profile.pass_s) == (32, 1e-5, 0.007)
    entries = {entry["name"]: entry for entry in yaml.safe_load(out.read_text())["tp"][1]["operators"]}
    assert entries["qkv_gemm"]["constant_s"] == pytest.approx(30e-6, rel=1e-4)
    assert entries["qkv_gemm"]["fit"]["left_out"] == 0
    text = (report / "report.md").read_text()
    assert "| 1 | whole_prefill | 2048 | 0 |" in text
    assert "-9.1 %" in text
    assert {path.stem for path in report.glob("*.png")} == {f"tp1_{name}" for name in entries}
    fcfs = ComposedPolicy("arrival", Alone(), "request")
    result = simulate([Request(id=0, arrival_s=0.0, prompt_tokens=2048)], policy=fcfs, latency=LatencyModel(profile))
    assert result.requests.ttft_s.item() == pytest.approx(LatencyModel(profile).isolated_s(2048))


def test_the_same_trace_gives_the_same_bytes(trace, tmp_path):
    paths = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    for path in paths:
        assert main(["fit", str(trace), "--out", str(path)]) == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert read_profile(paths[0]).gpu_memory_bytes == 80 * 2**30


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda rows: rows[rows["operator"] != "o_proj_gemm"], "tp 1: the trace has no rows of o_proj_gemm"),
        (lambda rows: rows[rows["operator"] != "down_gemm"], "no rows of gate_up_gemm and down_gemm (or router_gemm"),
        (lambda rows: rows[(rows["operator"] != "rope") | (rows["new_tokens"] < 8)], "rope: 3 distinct token counts"),
        (
            lambda rows: rows.assign(gpu=["a", *["b"] * (len(rows) - 1)]),
            "the trace holds several gpus: a, b; fit one, with --gpu",
        ),
        (lambda rows: rows.assign(model="mine"), "the shapes of 'mine' are not known; give --config"),
    ],
)
def test_a_trace_that_cannot_be_fitted_is_refused_by_name(trace, tmp_path, capsys, change, complaint):
    write_trace(change(read_trace(trace)), trace)
    assert main(["fit", str(trace), "--out", str(tmp_path / "p.yaml")]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "p.yaml").exists()


def test_a_latency_of_zero_is_refused_with_its_line(trace, tmp_path, capsys):
    lines = trace.read_text().splitlines()
    lines[4] = lines[4].replace(str(seconds("embedding", 8)), "0")
    trace.write_text("\n".join(lines) + "\n")
    assert main(["fit", str(trace), "--out", str(tmp_path / "p.yaml")]) == 2
    assert "trace.csv: line 5: latency_s is '0'; allowed: finite seconds above 0" in capsys.readouterr().err


def test_the_list_has_a_line_for_each_model_gpu_and_degree(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 20
    assert sum(line.startswith("llama3-8b ") and " h100 " in line for line in lines) == 3
    assert all("%" in line for line in lines[1:])
    assert main(["list", "--model=qwen3-32b", "--gpu=h200"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["list", "--model=none"]) == 1


def test_a_profile_is_shown_with_its_operators_errors_and_gaps(capsys):
    assert main(["show", "qwen2.5-14b", "a100", "--tp=2"]) == 0
    shown = capsys.readouterr().out
    for part in ("qwen2.5-14b on a100", "gate_up_gemm", "all_reduce_mlp", "decode_attention", "%", "query heads = 20"):
        assert part in shown
    assert main(["show", "qwen2.5-14b", "a100", "--tp=8"]) == 2
    assert "has tp 1, 2" in capsys.readouterr().err
    assert main(["show", "qwen", "a100"]) == 2
    assert "did you mean" in capsys.readouterr().err
