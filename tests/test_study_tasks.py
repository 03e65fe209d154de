"""Studies as the command runs them: files, exit codes, what is kept when they are cut short."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from flowsim.config import build, compose, make

ROOT = Path(__file__).parent.parent
SMALL = "workload.num_requests=150 task.jobs=1 hydra.run.dir=out"


def run(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments(command), cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )


def arguments(command: str) -> list[str]:
    return [sys.executable, "-m", "flowsim", *command.split()]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_goodput_writes_its_answer_every_run_and_a_figure_and_a_rerun_runs_nothing(tmp_path):
    command = f"task=goodput task.precision=0.1 policy=fcfs {SMALL}"
    done = run(tmp_path, command)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out/goodput.json").read_text())
    assert {"goodput_rps", "ci", "target", "num_requests", "evaluations", "bracket_end"} <= set(found)
    assert f"goodput {found['goodput_rps']:.2f} req/s" in done.stdout
    assert (found["target"], found["num_requests"], found["settings"]["policy"]) == (0.9, 150, "fcfs")
    held = [one["rate_rps"] for one in found["evaluations"] if one["attained"] >= 0.9]
    assert found["goodput_rps"] == max(held)
    runs = pd.read_csv(tmp_path / "out/evaluations.csv")
    assert len(runs) == 3 * len(found["evaluations"])
    assert set(runs["policy.order"]) == {"arrival"}
    assert (tmp_path / "out/goodput.png").stat().st_size > 5000
    points = (tmp_path / "out/points.jsonl").read_bytes()
    again = run(tmp_path, f"{command} quiet=true report=none")
    assert (again.returncode, again.stdout) == (0, "")
    assert (tmp_path / "out/points.jsonl").read_bytes() == points
    assert json.loads((tmp_path / "out/goodput.json").read_text()) == found


def test_slo_scale_and_compare_write_theirs(tmp_path):
    scale = run(tmp_path, f"task=slo_scale task.seeds=[0,1] task.per_class=true workload.rate_rps=2 {SMALL}1")
    assert scale.returncode == 0, scale.stderr
    found = json.loads((tmp_path / "out1/slo_scale.json").read_text())
    assert f"{found['slo_scale']:.3f}" in scale.stdout
    assert found["rate_rps"] == 2
    compare = run(tmp_path, f"task=compare task.policies=[fcfs,edf] task.seeds=[0,1] report.format=pdf {SMALL}2")
    assert compare.returncode == 0, compare.stderr
    rows = json.loads((tmp_path / "out2/compare.json").read_text())["differences"]
    table = pd.read_csv(tmp_path / "out2/differences.csv")
    assert [row["difference"] for row in rows] == pytest.approx(table["difference"].tolist())
    assert set(table["policy"]) == {"fcfs", "edf"}
    assert (tmp_path / "out1/slo_scale.png").exists()
    assert (tmp_path / "out2/compare.pdf").exists()


OWN = """
import os
from flowsim import Batch, Part, Stops

class Own:
    stops = Stops.REQUEST

    def __init__(self, ends: str = ""):
        self.ends = ends

    def select(self, view):
        if self.ends == "raises":
            raise RuntimeError("no idea")
        if self.ends == "dies":
            os._exit(9)
        if view.running is not None:
            return view.running
        for job in view.waiting:
            if view.fits([Part(job, job.left_tokens)]):
                return Batch([Part(job, job.left_tokens)])
        return None
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/own.yaml").write_text("# python -m flowsim policy=own\n_target_: own.Own\n")
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def test_runs_that_raise_or_whose_worker_dies_are_listed_and_the_others_kept(own):
    grid = "task.grid={policy.ends:['',raises,dies],workload.rate_rps:[2,4]}"
    command = f"--config-dir . task=sweep policy=own {grid} {SMALL} task.jobs=2"
    done = run(own, command)
    assert done.returncode == 1
    assert "4 of 6 runs failed" in done.stderr
    assert "Traceback" not in done.stderr
    table = pd.read_csv(own / "out/sweep.csv", keep_default_na=False)
    errors = dict(zip(zip(table["policy.ends"], table["workload.rate_rps"], strict=True), table.error, strict=True))
    assert all("no idea" in errors["raises", rate] for rate in (2, 4))
    assert all("worker died" in errors["dies", rate] for rate in (2, 4))
    assert errors["", 2] == errors["", 4] == ""
    assert len(pd.read_csv(own / "out/failed.csv")) == 4
    assert len((own / "out/points.jsonl").read_text().splitlines()) == 2
    (own / "own.py").write_text(OWN.replace('== "raises"', '== "never"').replace('== "dies"', '== "never"'))
    mended = run(own, command)
    assert mended.returncode == 0, mended.stderr
    assert not (own / "out/failed.csv").exists()
    assert len((own / "out/points.jsonl").read_text().splitlines()) == 2 + 6, "other code, other runs"


@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal to a process group")
def test_ctrl_c_keeps_what_is_finished_and_the_same_command_goes_on(tmp_path):
    grid = f"task.grid={{workload.rate_rps:[{','.join(str(rate) for rate in range(2, 42))}]}}"
    command = f"task=sweep {grid} workload.num_requests=600 task.jobs=2 hydra.run.dir=out"
    process = subprocess.Popen(
        arguments(command), cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    points = tmp_path / "out/points.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (points.exists() and points.read_bytes().count(b"\n") >= 3):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    kept = points.read_bytes()
    count = kept.count(b"\n")
    assert process.returncode == 130
    assert f"{count} runs are kept" in said
    assert "Traceback" not in said
    done = run(tmp_path, command)
    assert done.returncode == 0
    assert points.read_bytes().startswith(kept)
    assert points.read_bytes().count(b"\n") == 40


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of a file as POSIX does")
def test_a_full_disk_keeps_what_is_finished_and_says_so(tmp_path):
    code = (
        "import resource, signal, flowsim\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "grid = {'workload.rate_rps': [1, 2, 3, 4]}\n"
        "try:\n"
        "    flowsim.sweep(['workload.num_requests=50'], grid, folder='out', jobs=1)\n"
        "except OSError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert "points.jsonl" in done.stdout
    kept = [line for line in (tmp_path / "out/points.jsonl").read_text().splitlines() if line.endswith("}")]
    assert 0 < len(kept) < 4
    assert f"the {len(kept)} points before it are kept" in done.stdout


MISTAKES = {
    "task=goodput task.traget=0.8": "'task.target'",
    "task=goodput task.target=abc": "task.target",
    "task=goodput task.per_class=7": "true or false",
    "task=goodputt": "'goodput'",
    "task=compare task.polices=[fcfs]": "'task.policies'",
    "task=slo_scale task.scale=[1]": "'task.scales'",
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistyped_key_of_a_task_is_named_beside_what_is_near(typed):
    with pytest.raises(ValueError) as caught:
        make(compose(typed.split()), "task")
    assert MISTAKES[typed] in str(caught.value)


def test_a_study_of_nonsense_ends_with_2_and_a_sentence(tmp_path):
    for command, offered in (
        ("task=goodput task.target=1.2", "at most 1"),
        ("task=goodput task.seeds=[]", "at least one seed"),
        ("task=compare task.policies=[fcsf,edf]", "'fcfs'"),
    ):
        done = run(tmp_path, f"{command} {SMALL}")
        assert (done.returncode, done.stdout) == (2, "")
        assert offered in done.stderr
        assert "Traceback" not in done.stderr


def test_the_tasks_shipped_state_the_defaults_of_the_functions():
    import inspect

    import flowsim

    for name in ("goodput", "slo_scale", "compare", "sweep"):
        config = compose([f"task={name}", "++task.grid={}"] if name == "sweep" else [f"task={name}"]).task
        defaults = {key: one.default for key, one in inspect.signature(getattr(flowsim, name)).parameters.items()}
        for key, value in config.items():
            if key in defaults and key != "grid":
                given = list(value) if hasattr(value, "__iter__") and not isinstance(value, str) else value
                stated = list(defaults[key]) if isinstance(defaults[key], tuple) else defaults[key]
                assert given == stated, f"task.{key} of {name}"


def test_a_study_leaves_hydra_as_it_was():
    from hydra.core.global_hydra import GlobalHydra

    from flowsim.variants import variant

    before = GlobalHydra.instance().hydra
    settings, choices = variant(["policy=fcfs", "seed=5"], {"tp": 2}, objects={})
    assert GlobalHydra.instance().hydra is before
    assert (choices["policy"], settings["tp"], settings["workload"]["seed"]) == ("fcfs", 2, 5)
    assert build(compose(["policy=fcfs", "seed=5", "tp=2"])).seed == 5


def test_a_grid_is_searched_in_each_of_its_cells(tmp_path):
    for task, figure, more in (
        ("goodput", "goodput_rps", ""),
        ("slo_scale", "slo_scale", "workload.rate_rps=2 task.scales=[0.5,1,2]"),
    ):
        command = (
            f"task={task} task.precision=0.3 task.grid={{policy:[fcfs,flowprefill]}} task.seeds=[0] {more} {SMALL}"
        )
        done = run(tmp_path, command)
        assert done.returncode == 0, done.stderr
        table = pd.read_csv(tmp_path / f"out/{task}.csv").set_index("policy")
        assert list(table.index) == ["fcfs", "flowprefill"]
        assert len(json.loads((tmp_path / f"out/{task}.json").read_text())) == 2
        assert (tmp_path / f"out/{task}.png").is_file()
        better = table[figure].flowprefill / table[figure].fcfs
        assert better > 1.0 if task == "goodput" else better < 1.0


def test_an_experiment_is_a_configuration_that_changes_the_whole_one():
    for spelling in ("+experiment=burstiness", "experiment=burstiness"):
        config = compose([spelling, "workload.num_requests=10"])
        assert (config.gpu, config.workload.num_requests) == ("a800", 10)
        assert set(config.task.grid) == {"policy", "cv"}
    with pytest.raises(ValueError, match="did you mean 'burstiness'"):
        compose(["+experiment=burstines"])
