"""Sweeps on clusters of this machine, and Hydra's launchers; each is skipped where its library is not installed.

The environments that they need exclude each other; CONTRIBUTING.md says how to make each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow

SWEEP = """
import flowsim

class Own:
    stops = flowsim.Stops.REQUEST
    def select(self, view):
        if view.running is not None:
            return view.running
        for job in view.waiting:
            if view.fits([flowsim.Part(job, job.left_tokens)]):
                return flowsim.Batch([flowsim.Part(job, job.left_tokens)])
        return None

class Raises(Own):
    def select(self, view):
        raise RuntimeError("no idea")

if __name__ == "__main__":
    import sys, warnings
    warnings.simplefilter("ignore")
    grid = {"policy": {"own": Own(), "raises": Raises(), "fcfs": "fcfs"}, "workload.rate_rps": [2, 6]}
    options = {"jobs": 2, "backend": sys.argv[1]} if sys.argv[1] != "none" else {"jobs": 1}
    table = flowsim.sweep(["workload.num_requests=100"], grid, seeds=(0, 1), folder=sys.argv[1], **options)
    print("result", table[["policy", "workload.rate_rps", "seed", "attainment", "error"]].to_json(orient="records"))
"""


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("result "))[7:])


@pytest.mark.parametrize(("backend", "library"), [("dask", "distributed"), ("ray", "ray")])
def test_a_cluster_gives_the_figures_of_one_process_and_keeps_them(backend, library, tmp_path):
    pytest.importorskip(library)
    (tmp_path / "study.py").write_text(SWEEP)
    alone, spread = (rows(command(tmp_path, "study.py", name)) for name in ("none", backend))
    assert spread == alone
    assert sum("no idea" in (row["error"] or "") for row in spread) == 4
    assert len((tmp_path / backend / "points.jsonl").read_text().splitlines()) == 8


LAUNCHERS = {
    "joblib": ("hydra_plugins.hydra_joblib_launcher", ["+experiment=on_cores", "hydra.launcher.n_jobs=2"]),
    "submitit_local": (
        "hydra_plugins.hydra_submitit_launcher",
        ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"],
    ),
    "ray": ("hydra_plugins.hydra_ray_launcher", ["+experiment=on_ray", "+hydra.launcher.ray.init.num_cpus=2"]),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_runs_each_job_and_the_exit_code_says_that_one_failed(launcher, tmp_path):
    plugin, options = LAUNCHERS[launcher]
    pytest.importorskip(plugin)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/own.yaml").write_text("# python -m flowsim policy=own\n_target_: study.Own\n")
    (tmp_path / "study.py").write_text(SWEEP)
    arguments = ["-m", "flowsim", "--config-dir", ".", "-m", *options, "workload.num_requests=50", "quiet=true"]
    good = command(tmp_path, *arguments, "policy=own,fcfs", "hydra.sweep.dir=good")
    assert good.returncode == 0, good.stderr[-3000:]
    found = [json.loads((tmp_path / f"good/{number}/summary.json").read_text()) for number in (0, 1)]
    assert found[0]["attainment"] == found[1]["attainment"], "one's own policy was found by the workers"
    bad = command(tmp_path, *arguments, "workload.rate_rps=-1,2", "hydra.sweep.dir=bad")
    assert bad.returncode == 2
    assert "rate_rps is -1" in bad.stderr
    assert (tmp_path / "bad/1/summary.json").exists(), "the others ran"


def test_the_slurm_experiment_names_what_it_lacks_or_is_composed(tmp_path):
    shown = command(tmp_path, "-m", "flowsim", "+experiment=on_slurm", "hydra.launcher.partition=cpu", "--cfg", "hydra")
    try:
        import hydra_plugins.hydra_submitit_launcher  # noqa: F401
    except ImportError:
        assert shown.returncode == 2
        assert "flowsim-prefill[slurm]" in shown.stderr
    else:
        assert shown.returncode == 0, shown.stderr
        assert "partition: cpu" in shown.stdout
        assert "SlurmLauncher" in shown.stdout


def test_a_policy_is_tuned_and_the_best_measured_with_seeds_that_did_not_choose_it(tmp_path):
    pytest.importorskip("optuna")
    few = ["task.trials=4", "task.seeds=[0]", "task.held_out_seeds=[7,8]", "task.precision=0.2", "task.jobs=1"]
    arguments = [
        "-m",
        "flowsim",
        "+experiment=tune_flowprefill",
        "workload.num_requests=100",
        "hydra.run.dir=out",
        *few,
    ]
    done = command(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out/tune.json").read_text())
    assert found["goodput_rps"] == max(one["goodput_rps"] for one in found["trials"])
    assert len(found["trials"]) == 4
    assert set(found["best"]) == {"policy.batching.tokens", "policy.batching.reserve", "policy.stops"}
    assert found["held_out"]["seeds"] == [7, 8]
    arguments[arguments.index("task.trials=4")] = "task.trials=5"
    again = command(tmp_path, *arguments, "task.bound=true")
    assert again.returncode == 0, again.stderr[-3000:]
    more = json.loads((tmp_path / "out/tune.json").read_text())
    assert more["trials"][:4] == found["trials"], "a rerun goes on where it ended"
    assert len(more["trials"]) == 5
    assert "bound_rps" not in found["held_out"]
    assert more["held_out"]["goodput_rps"] <= more["held_out"]["bound_rps"]
    assert "any schedule: at most" in again.stdout
    refused = command(tmp_path, *arguments, "task.bound=true", "cluster.jitter_sigma=0.1")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "jitter_sigma" in refused.stderr
