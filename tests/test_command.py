"""`python -m flowsim` as a user types it: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import flowsim
from flowsim.check import check_result
from flowsim.config import ConfigError, build, compose

IMPORTED_FROM = str(Path(flowsim.__file__).parents[1])
FILES = {"summary.json", "requests.csv", "segments.csv", "config.yaml", "ttft.png", "worst_blocking.png"}
CLASSES = {"text", "image", "search", "file"}
STATISTICS = {"mean", "p50", "p90", "p99"}
SUMMARY_KEYS = {
    "requests", "rate_rps", "offered_load", "attainment", "attainment_by_class", "impossible", "ttft_s",
    "ttft_s_by_class", "preemptions", "batches", "utilisation", "scheduler", "rejected", "unfinished",
    "simulated_s", "simulation_wall_s", "events_per_request", "extrapolated", "measured", "left_out", "gpus",
    "rejected_by_reason", "utilisation_by_instance", "suspended_s", "longest_wait_s_by_class",
    "partial", "tbt_mean_s", "tbt_p99_s", "tbt_max_s", "tbt_attainment", "tbt_attainment_by_class", "joint_attainment",
    "joint_attainment_by_class", "decode", "pools", "failures", "migrations", "finished", "measured_by_class",
    "paused_by_class", "ttft_slo_s_by_class", "tbt_mean_s_by_class",
}  # fmt: skip


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


def run(folder: Path, *commands: str, hash_seed: str = "random") -> list[Ran]:
    """Runs commands at the same time, from a folder that is not the checkout."""
    environment = {**os.environ, "PYTHONPATH": IMPORTED_FROM, "PYTHONHASHSEED": hash_seed, "COLUMNS": "120"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "flowsim", *command.split()],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        for command in commands
    ]
    finished = []
    for process in started:
        out, err = process.communicate(timeout=120)
        finished.append(Ran(process.returncode, out, err))
    return finished


def results(folder: Path) -> list[Path]:
    """The run folders below a folder."""
    return sorted(path.parent for path in folder.rglob("requests.csv"))


def test_both_spellings_started_at_once_from_another_folder_give_equal_results_in_two_folders(tmp_path):
    ran = run(
        tmp_path,
        "+policy=fcfs +workload=mixed workload.num_requests=200",
        "policy=fcfs workload=mixed workload.num_requests=200",
    )
    assert [one.code for one in ran] == [0, 0]
    first, second = results(tmp_path / "outputs")
    assert (first / "requests.csv").read_bytes() == (second / "requests.csv").read_bytes()
    for one in ran:
        assert set(one.out.split()) >= CLASSES, "a row for each class"
        assert "200 requests, offered load" in one.err, "what runs is said, and not among the results"
        assert sum(folder.name in one.out for folder in (first, second)) == 1, "its folder is printed"


def test_a_run_writes_every_result_and_replays_as_a_trace(tmp_path):
    (ran,) = run(tmp_path, "workload.num_requests=200 seed=3 hydra.run.dir=first")
    assert ran.code == 0
    assert {path.name for path in (tmp_path / "first").iterdir()} >= FILES
    summary = json.loads((tmp_path / "first/summary.json").read_text())
    assert set(summary) == SUMMARY_KEYS
    assert set(summary["ttft_s"]) == STATISTICS
    assert set(summary["attainment_by_class"]) == set(summary["ttft_s_by_class"]) == CLASSES
    assert all(set(of_class) == STATISTICS for of_class in summary["ttft_s_by_class"].values())
    assert set(summary["preemptions"]) == {"count", "paused", "per_request", "blocking_s"}
    assert set(summary["preemptions"]["blocking_s"]) == STATISTICS | {"max"}
    assert set(summary["batches"]) == {"count", "multi", "requests_in_multi"}
    assert set(summary["scheduler"]) == {"decisions", "wall_s", "share"}
    assert summary["requests"] == 200

    (replayed,) = run(tmp_path, "workload=trace workload.path=first/requests.csv hydra.run.dir=again quiet=true")
    assert (replayed.code, replayed.out) == (0, ""), "quiet prints nothing on stdout"
    again, first = (tmp_path / name / "requests.csv" for name in ("again", "first"))
    assert again.read_bytes() == first.read_bytes()


def test_the_hash_seed_changes_no_byte_of_the_requests(tmp_path):
    for seed in ("0", "1"):
        (ran,) = run(tmp_path, f"workload.num_requests=200 quiet=true hydra.run.dir={seed}", hash_seed=seed)
        assert ran.code == 0
    assert (tmp_path / "0/requests.csv").read_bytes() == (tmp_path / "1/requests.csv").read_bytes()


def test_a_sweep_gives_each_policy_a_folder_with_results(tmp_path):
    (ran,) = run(tmp_path, "-m +policy=fcfs,flowprefill workload.num_requests=200 hydra.sweep.dir=sweep")
    assert ran.code == 0
    folders = results(tmp_path / "sweep")
    assert len(folders) == 2
    assert all({path.name for path in folder.iterdir()} >= FILES for folder in folders)
    fcfs, flowprefill = (json.loads((folder / "summary.json").read_text()) for folder in folders)
    assert fcfs["preemptions"]["count"] == 0 < flowprefill["preemptions"]["count"]


def test_a_run_in_which_no_request_finishes_exits_with_1_unless_told_not_to(tmp_path):
    command = "cluster.kv_blocks=1 workload=uniform workload.num_requests=200 hydra.run.dir="
    failed, allowed = run(tmp_path, f"{command}failed", f"{command}allowed fail_on_empty=false")
    assert (failed.code, allowed.code) == (1, 0)
    assert "no request finished" in failed.err
    assert "Traceback" not in failed.err + allowed.err
    for name in ("failed", "allowed"):
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert set(summary) == SUMMARY_KEYS
        assert (summary["rejected"], summary["attainment"]) == (200, 0.0)
        assert summary["ttft_s"] == dict.fromkeys(STATISTICS)


def test_ctrl_c_ends_the_simulation_and_what_it_has_is_written_and_marked_as_partial(tmp_path):
    command = [sys.executable, "-m", "flowsim", "workload.num_requests=300000", "report=none", "hydra.run.dir=out"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": IMPORTED_FROM}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
    )  # fmt: skip
    waited = 0
    while not (tmp_path / "out/config.yaml").exists() and waited < 600:
        time.sleep(0.1)
        waited += 1
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "partial: stopped at" in out
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["partial"] is True
    assert 0 < summary["requests"] == 300_000 - summary["left_out"]["after_horizon"] < 300_000
    result = flowsim.Result.load(tmp_path / "out")
    check_result(result)


def test_nothing_slow_is_imported_for_a_command_that_does_not_need_it(tmp_path):
    """Half a second each: they are why a short run without figures starts at once."""
    listing = "import sys; from flowsim.__main__ import main\ntry: main()\nexcept SystemExit: pass\n"
    listing += "print('imported', *sys.modules)"
    for arguments, unneeded in (
        (["--help"], {"hydra", "pandas", "matplotlib", "scipy", "rich", "joblib"}),
        (["workload.num_requests=50", "report=none"], {"pandas", "matplotlib", "scipy", "joblib", "plotly"}),
        (["workload.num_requests=50"], {"pandas", "scipy", "joblib", "matplotlib.pyplot", "plotly"}),
    ):
        done = subprocess.run(
            [sys.executable, "-c", listing, *arguments], cwd=tmp_path, text=True, capture_output=True, check=True,
            env={**os.environ, "PYTHONPATH": IMPORTED_FROM},
        )  # fmt: skip
        imported = set(done.stdout.rsplit("imported ", 1)[1].split())
        assert not imported & unneeded, arguments


def test_help_lists_what_can_be_chosen(tmp_path):
    (ran,) = run(tmp_path, "--help")
    assert ran.code == 0
    policies, workloads = ("fcfs", "chunked_2k", "chunked_8k", "flowprefill"), ("mixed", "uniform", "trace")
    for name in (*policies, *workloads, "llama3-8b", "llama3.1-8b", "a100"):
        assert name in ran.out


def test_a_policy_of_ones_own_is_a_class_and_a_yaml_in_a_folder(tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/last_come.yaml").write_text("_target_: mine.LastCome\npatience_s: 1.0\n")
    (tmp_path / "mine.py").write_text(
        "from flowsim import Batch, Part, Stops\n"
        "class LastCome:\n"
        "    stops = Stops.REQUEST\n"
        "    def __init__(self, patience_s: float):\n"
        "        self.patience_s = patience_s\n"
        "    def select(self, view):\n"
        "        for job in sorted(view.waiting, key=lambda job: -job.id):\n"
        "            if view.running is None and view.fits([Part(job, job.left_tokens)]):\n"
        "                return Batch([Part(job, job.left_tokens)])\n"
        "        return view.running\n"
    )
    command = "--config-dir . policy=last_come workload.num_requests=200"
    ran, misspelt_key, misspelt_name = run(
        tmp_path, command, f"{command} policy.patiense_s=2", command.replace("last_come", "last_comes")
    )
    assert ran.code == 0, ran.err
    for one, near in ((misspelt_key, "policy.patience_s"), (misspelt_name, "'last_come'")):
        assert (one.code, one.out) == (2, "")
        assert near in one.err
        assert "Traceback" not in one.err


MISTAKES = {  # what was typed: what the complaint must offer
    "policy=flowprefil": ["'flowprefill'", "chunked_2k", "no_batching"],
    "workload.rte_rps=3": ["'workload.rate_rps'", "workload.num_requests"],
    "+workload.rte_rps=3": ["'workload.rate_rps'", "workload.num_requests"],
    "+polcy=x": ["'policy'", "workload"],
    "gpu=a10": ["'a100'"],
    "model=llama-8b": ["'llama3-8b'", "llama3.1-8b"],
    "tp=3": ["tp 1"],
    "policy.stops=layr": ["'layer'", "block, layer, operator, pass, request"],
    "policy.order=slack": ["'slack_edf'", "arrival"],
    "workload.rate_rps=abc": ["workload.rate_rps", "'abc'", "number"],
    "workload=trace": ["workload.path"],
    "workload=trace workload.path=nowhere.csv": ["nowhere.csv"],
    "overheads.chek_s=1e-5": ["overheads.chek_s", "overheads"],
    "overheads.check_s=-1": ["overheads.check_s", "at least 0"],
    "cluster.instances=0": ["cluster.instances", "at least 1"],
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_named_beside_what_is_near_or_allowed(typed):
    with pytest.raises(ValueError) as caught:
        build(compose(typed.split()))
    for offered in MISTAKES[typed]:
        assert offered in str(caught.value)


def test_a_plus_before_the_choice_of_any_group_changes_nothing():
    chosen = [
        "policy=vllm",
        "workload=chat",
        "cluster=colocated",
        "router=least_work",
        "predictor=poly3",
        "report=none",
    ]
    assert compose([f"+{one}" for one in chosen]) == compose(chosen)


def test_an_unknown_name_is_refused_when_a_configuration_is_composed():
    with pytest.raises(ConfigError, match="did you mean 'flowprefill'"):
        compose(["+policy=flowprefil"])


def test_the_command_refuses_a_mistake_with_2_on_stderr_alone_and_no_traceback(tmp_path):
    typed = ["policy=flowprefil", "workload.rte_rps=3", "+workload.rte_rps=3", "workload=trace"]
    unwritable = "hydra.run.dir=/dev/null/x"
    for command, ran in zip([*typed, unwritable], run(tmp_path, *typed, unwritable), strict=True):
        assert (ran.code, ran.out) == (2, ""), command
        assert "Traceback" not in ran.err
        for offered in MISTAKES.get(command, ["/dev/null/x"]):
            assert offered in ran.err
