"""What the README says works as it stands there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
SMALL = "workload.num_requests=100"


def commands() -> list[str]:
    """Every `python -m flowsim` line of the README's shell blocks, without its comment."""
    lines = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
    found = [
        line[line.index("python -m flowsim") :].split("#")[0].strip() for line in lines if "python -m flowsim" in line
    ]
    assert len(found) >= 7
    return found


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    arguments = shlex.split(command)[3:]
    given = [] if "--help" in arguments or any("num_requests" in one for one in arguments) else [SMALL]
    return subprocess.run(
        [sys.executable, "-m", "flowsim", *arguments, *given],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"},
        capture_output=True,
        text=True,
        check=False,
    )


def own_policy(folder: Path) -> None:
    """The policy of the README and its YAML, written where the README says."""
    code = next(text for kind, text in BLOCKS if kind == "python" and text.startswith("# my_policy.py"))
    config = next(text for kind, text in BLOCKS if kind == "yaml" and "my_policy" in text)
    (folder / "my_policy.py").write_text(code)
    (folder / "my_conf" / "policy").mkdir(parents=True)
    (folder / "my_conf" / "policy" / "least_slack.yaml").write_text(config)


@pytest.mark.parametrize("command", commands())
def test_each_command_of_the_readme_runs(command, tmp_path):
    own_policy(tmp_path)
    if "my_trace/trace.csv" in command:
        run("python -m flowsim task=export workload=mixed hydra.run.dir=my_trace", tmp_path)
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert not re.search("Traceback|Warning|Error", done.stderr)
    assert done.stdout


def test_the_policy_of_the_readme_has_about_20_lines_and_conforms(tmp_path, monkeypatch):
    from flowsim.testing import check_policy

    own_policy(tmp_path)
    code = (tmp_path / "my_policy.py").read_text()
    assert 15 <= len([line for line in code.splitlines() if line.strip()]) <= 25
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_policy

    check_policy(my_policy.LeastSlack())


def test_the_python_example_of_the_readme_runs(capsys):
    code = next(text for kind, text in BLOCKS if kind == "python" and text.startswith("import flowsim"))
    exec(code, {})
    assert 0.9 < float(capsys.readouterr().out) <= 1.0


def test_the_readme_names_every_key_of_the_summary_and_no_other(tmp_path):
    assert run(f"python -m flowsim hydra.run.dir={tmp_path}", tmp_path).returncode == 0
    section = README.split("## summary.json")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    assert named == set(json.loads((tmp_path / "summary.json").read_text()))


def test_each_configuration_begins_with_the_command_that_runs_it():
    for path in ROOT.glob("conf/**/*.yaml"):
        lines = path.read_text().splitlines()
        first = next(line for line in lines if not line.startswith("# @"))  # Hydra's own header has to be before it
        assert first.startswith("# python -m flowsim"), path
        if path.parent.name != "conf":
            assert f"{path.parent.name}={path.stem}" in first, path
