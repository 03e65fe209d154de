"""The engine held against real vLLM: `python -m experiments.validate_vllm`, as a user runs it."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest

from experiments import validate_vllm


@pytest.fixture(scope="module")
def published(data_dir, tmp_path_factory):
    """The exit status and the figures of both published runs."""
    assert (data_dir / validate_vllm.REQUESTS).is_file()
    out = tmp_path_factory.mktemp("vllm") / "figures.json"
    return validate_vllm.main(["--json", str(out)]), json.loads(out.read_text())


@pytest.mark.parametrize("run", ["llama3-8b/rtxpro6000", "qwen3-30b-a3b/rtxpro6000"])
def test_both_published_runs_are_within_their_bars(published, run):
    code, figures = published
    assert code == 0
    for metric, limits in validate_vllm.BARS[run.split("/")[0]].items():
        for name, limit in limits.items():
            assert abs(figures[run][metric][name]["relative"]) <= limit, (metric, name)


def test_the_figures_say_what_was_measured_what_was_simulated_and_by_how_much_that_is_off(published):
    for run in published[1].values():
        assert set(run) == {"ttft", "tpot", "e2e"}
        for metric in run.values():
            assert set(metric) == {"mean", "p50", "p90", "p99"}
            for one in metric.values():
                assert one["relative"] == pytest.approx(one["simulated"] / one["measured"] - 1.0)


@pytest.fixture(scope="module")
def llama(data_dir, tmp_path_factory) -> Path:
    """The first sixty requests of the Llama run in a file of their own, as if of an RTX 4090."""
    with gzip.open(data_dir / validate_vllm.REQUESTS, "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == "Llama-3.1-8B"][:60]
    path = tmp_path_factory.mktemp("runs") / "run.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows({**row, "gpu": "RTX4090"} for row in rows)
    return path


def replayed(path: Path, tmp_path: Path, *options: str) -> dict:
    out = tmp_path / "out.json"
    assert validate_vllm.main(["--requests", str(path), "--json", str(out), *options]) == 0
    return json.loads(out.read_text())


def test_a_run_of_ones_own_is_replayed_with_its_gpu_and_little_kv_memory(llama, tmp_path, capsys):
    plenty = replayed(llama, tmp_path, "--max-num-seqs", "256", "--kv-tokens", "200000")
    assert (
        "llama3-8b on rtx4090, tp 1: 60 requests, 0 tokens from the prefix cache, 0 evictions"
        in capsys.readouterr().out
    )
    little = replayed(llama, tmp_path, "--max-num-seqs", "256", "--kv-tokens", "12000")
    assert " 0 evictions" not in capsys.readouterr().out
    assert little["e2e"]["mean"]["simulated"] > 1.5 * plenty["e2e"]["mean"]["simulated"]
    assert little["ttft"]["mean"]["measured"] == plenty["ttft"]["mean"]["measured"]


@pytest.mark.parametrize("options", [["--max-num-seqs", "8"], ["--gpu", "rtxpro6000", "--tp", "2"]])
def test_every_option_counts(llama, tmp_path, options):
    assert replayed(llama, tmp_path, *options) != replayed(llama, tmp_path)


def test_a_slower_link_makes_a_group_slower(llama, tmp_path):
    group = ["--gpu", "rtxpro6000", "--tp", "2", "--link-latency-us", "40", "--link-gbps"]
    fast, slow = (replayed(llama, tmp_path, *group, gbps)["tpot"]["mean"]["simulated"] for gbps in ("16", "4"))
    assert slow > fast
    assert replayed(llama, tmp_path, "--gpu", "rtxpro6000", "--tp", "2")["tpot"]["mean"]["simulated"] == pytest.approx(
        fast
    )


@pytest.mark.usefixtures("data_dir")
def test_prompts_that_share_prefixes_compute_less(capsys):
    assert validate_vllm.main(["--model", "llama3.1-8b"]) == 0
    assert "19520" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "llama3-7b"], "no run of llama3-7b"),
        (["--requests", "nowhere.csv"], "nowhere.csv"),
        (["--model", "llama3-8b", "--prefix-workload", "shargpt"], "no workload 'shargpt'"),
        (["--model", "llama3-8b", "--kv-tokens", "1000"], "did not finish"),
    ],
)
@pytest.mark.usefixtures("data_dir")
def test_a_mistake_is_named(options, said, capsys):
    assert validate_vllm.main(options) == 2
    assert said in capsys.readouterr().err


HEADER = "prompt_tokens,output_tokens,arrival_s,first_token_s,last_token_s"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "a.csv",
            f"{HEADER}\n10,5,0.0,0.1,0.5\nten,5,0.1,0.2,0.6\n",
            "a.csv, line 3: prompt_tokens is 'ten'; it must be a",
        ),
        ("a.csv", f"{HEADER}\n10,0,0.0,0.1,0.5\n", "a.csv, line 2: output_tokens is '0'; it must be a whole number"),
        ("a.csv", f"{HEADER}\n10,5,0.0,,0.5\n", "a.csv, line 2: first_token_s is ''; it must be a number of seconds"),
        ("a.csv", "prompt,output\n10,5\n", "a.csv: no column prompt_tokens, output_tokens"),
        ("a.csv", HEADER, "a.csv: no requests"),
        ("a.csv.gz", HEADER, "a.csv.gz: Not a gzipped file"),
    ],
)
def test_a_file_that_is_no_run_is_named_with_its_line(tmp_path, capsys, name, content, said):
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert validate_vllm.main(["--requests", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kv-tokens", "0"], "--kv-tokens is 0; it must be at least 16"),
        (["--prefix-hits", "run.csv", "--prefix-workload", "any"], "run.csv: no column workload, request"),
        (["--json", "nowhere/out.json"], "nowhere/out.json"),
    ],
)
def test_an_option_that_cannot_be_is_named(tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.csv").write_text(f"{HEADER}\n10,5,0.0,0.1,0.5\n", encoding="utf-8")
    command = ["--requests", "run.csv", "--model", "llama3-8b", "--gpu", "rtx4090"]
    assert validate_vllm.main([*command, *options]) == 2
    assert said in capsys.readouterr().err
