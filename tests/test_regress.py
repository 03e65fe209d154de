"""Gates on policy metrics, as a user has them: `python -m flowsim.regress` and `pytest --flowsim-baseline`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flowsim.config import CONF
from flowsim.regress import compare, load
from flowsim.regress.__main__ import main
from flowsim.regress.compare import Tolerance, Verdict, fails
from flowsim.regress.show import markdown

ROOT = Path(__file__).parents[1]
SUITE = """\
# Ours: two policies.
suite:
  policies: {ours: [policy=flowprefill], fcfs: [policy=fcfs]}
  workloads: {busy: [workload.rate_rps=8, workload.num_requests=80]}
  seeds: [0, 1]
tolerances: {"ttft_s*": {relative: 0.05}} # a comment
"""
CELL = ("ours", "busy")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> str:
    """The text of a recorded baseline of SUITE."""
    path = tmp_path_factory.mktemp("recorded") / "baseline.yaml"
    path.write_text(SUITE)
    assert main(["--baseline", str(path), "--update", "--reason", "first"]) == 0
    return path.read_text()


def changed(folder: Path, recorded: str, **replaced: str) -> Path:
    """A baseline whose suite was changed after its record."""
    path = folder / "baseline.yaml"
    for old, new in replaced.items():
        old = {"policy": "policy=flowprefill", "seeds": "seeds: [0, 1]", "tolerance": "relative: 0.05"}[old]
        assert old in recorded
        recorded = recorded.replace(old, new, 1)
    path.write_text(recorded)
    return path


def test_what_has_not_changed_passes(tmp_path, recorded, capsys):
    assert main(["--baseline", str(changed(tmp_path, recorded))]) == 0
    assert "Nothing moved" in capsys.readouterr().out


def test_a_policy_that_got_worse_fails_and_its_figures_are_named(tmp_path, recorded, capsys):
    path = changed(tmp_path, recorded, policy="policy=flowprefill, policy.stops=request")
    report = tmp_path / "report.md"
    assert main(["--baseline", str(path), "--markdown", str(report)]) == 1
    said = capsys.readouterr()
    assert re.search(r"ours +busy +attainment .* worse", said.out)
    assert "fcfs" not in said.out.split("policies 2")[0]
    assert "--update --reason" in said.err
    rows = [line for line in report.read_text().splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1, "every row has as many cells"
    assert any("| attainment |" in row and "| worse |" in row for row in rows)


def test_a_policy_that_got_better_is_told_and_passes(tmp_path, recorded, capsys):
    path = changed(tmp_path, recorded, policy="policy=fcfs", seeds="seeds: [0, 1]\n  figures: [attainment]")
    assert main(["--baseline", str(path), "--update", "--reason", "as fcfs"]) == 0
    path.write_text(path.read_text().replace("policy=fcfs", "policy=flowprefill", 1))
    capsys.readouterr()
    assert main(["--baseline", str(path)]) == 0
    assert re.search(r"attainment .* points .* better", capsys.readouterr().out)


def test_a_tolerance_lets_a_figure_move_that_far_and_no_further():
    was, allowed = [{"ttft_s.p99": 1.0}], [("ttft_s.*", Tolerance(relative=0.1))]
    assert compare(CELL, was, [{"ttft_s.p99": 1.09}], allowed) == []
    (move,) = compare(CELL, was, [{"ttft_s.p99": 1.11}], allowed)
    assert (move.verdict, move.change) == (Verdict.WORSE, pytest.approx(0.11))


@given(st.dictionaries(st.text(min_size=1), st.integers() | st.floats(allow_nan=False) | st.none(), min_size=1))
def test_figures_do_not_differ_from_themselves_and_a_count_that_does_by_one_is_seen(figures):
    assert compare(CELL, [figures], [figures]) == []
    (move,) = compare(CELL, [{**figures, "batches.count": 7}], [{**figures, "batches.count": 8}])
    assert move.verdict is Verdict.MOVED


def test_a_figure_that_is_gone_fails_a_new_one_does_not_and_a_run_without_record_does():
    was, now = {"rejected": 0, "unfinished": 0}, {"rejected": 0, "tbt_s.p99": 0.1}
    moves = compare(CELL, [was, None], [now, now])
    assert [(move.name, move.verdict) for move in moves] == [
        ("everything", Verdict.UNRECORDED),
        ("unfinished", Verdict.GONE),
        ("tbt_s.p99", Verdict.NEW),
    ]
    assert not fails(compare(CELL, [{"rejected": 0}], [now]))


def test_the_worst_seed_is_shown_with_how_many_moved():
    was, now = [{"unfinished": 3}] * 3, [{"unfinished": 2}, {"unfinished": 5}, {"unfinished": 9}]
    (move,) = compare(CELL, was, now)
    assert (move.verdict, move.now, move.seeds, move.of_seeds) == (Verdict.WORSE, 9, 3, 3)


def test_an_update_keeps_the_users_part_and_every_reason(tmp_path, recorded):
    path = changed(tmp_path, recorded, policy="policy=edf")
    head = path.read_text().split("recorded:")[0]
    assert main(["--baseline", str(path), "--update", "--reason", "EDF: is it better?"]) == 0
    assert path.read_text().split("recorded:")[0] == head
    reasons = [update["reason"] for update in yaml.safe_load(path.read_text())["recorded"]["updates"]]
    assert reasons == ["EDF: is it better?", "first"]
    assert main(["--baseline", str(path)]) == 0
    again = path.read_text()
    assert again.count("recorded:") == 1


@pytest.mark.parametrize("arguments", [["--update"], ["--reason", "why"], ["--update", "--reason", ""]])
def test_an_update_without_a_reason_is_refused(tmp_path, recorded, arguments, capsys):
    path = changed(tmp_path, recorded)
    with pytest.raises(SystemExit) as left:
        main(["--baseline", str(path), *arguments])
    assert left.value.code == 2
    assert "--reason" in capsys.readouterr().err
    assert path.read_text() == recorded


MISTAKES = {
    "suite: {polices: [fcfs]}": "did you mean 'policies'",
    "suite: {policies: [], workloads: [mixed]}": "suite.policies",
    "suite: {policies: [fcfs], workloads: {busy: mixed}}": "suite.workloads.busy",
    "suite: {policies: [fcfs], workloads: [mixed], seeds: [0, 0]}": "suite.seeds",
    "suite: {policies: [fcfz], workloads: [mixed]}": "'fcfs'",
    "suite: {policies: [fcfs], workloads: [mixed]}\ntolerances: {ttft_s: 5}": "tolerances.ttft_s",
    "suite: {policies: [fcfs], workloads: [mixed]}\ntolerances: {ttft_s: {relativ: 5}}": "relative",
    "recorded: {}\nsuite: {policies: [fcfs], workloads: [mixed]}": "last key",
    "[1, 2": "baseline.yaml",
    "": "policies: [flowprefill, fcfs]",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_the_file_is_named_with_the_file(tmp_path, text, capsys):
    path = tmp_path / "baseline.yaml"
    path.write_text(text)
    assert main(["--baseline", str(path)]) == 2
    said = capsys.readouterr().err
    assert MISTAKES[text] in said
    assert "Traceback" not in said


def test_a_file_that_is_not_there_is_met_with_one_to_begin_with(tmp_path, capsys):
    assert main(["--baseline", str(tmp_path / "none.yaml")]) == 2
    example = capsys.readouterr().err.split("for example:\n")[1]
    (tmp_path / "none.yaml").write_text(example)
    assert load(tmp_path / "none.yaml").suite.seeds == (0, 1)


OWN = """\
from flowsim import Batch, Part, Stops
class LastCome:
    stops = Stops.REQUEST
    def __init__(self, newest_first=True):
        self.sign = -1 if newest_first else 1
    def select(self, view):
        for job in sorted(view.waiting, key=lambda job: self.sign * job.id):
            if view.running is None and view.fits([Part(job, job.left_tokens)]):
                return Batch([Part(job, job.left_tokens)])
        return view.running
"""
OWN_SUITE = """\
suite:
  policies: {mine: {_target_: own_policies.LastCome}, shipped: [policy=fcfs]}
  workloads: {busy: [workload.rate_rps=6, workload.num_requests=60]}
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """A user's repository: a policy, its recorded baseline, a test, warnings that are errors."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / "own_policies.py").write_text(OWN)
    (folder / "baseline.yaml").write_text(OWN_SUITE)
    (folder / "test_own.py").write_text("def test_own(): pass\n")
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    done = run(folder, "flowsim.regress", "--baseline", "baseline.yaml", "--update", "--reason", "first")
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def run(folder: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def gate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest with the plugin, whether or not an installation names it."""
    return run(folder, "pytest", "-p", "pytest_flowsim", "--flowsim-baseline", "baseline.yaml", *arguments)


def test_pytest_runs_a_test_for_each_policy_and_workload_beside_the_users_own(repository):
    done = gate(repository, "-v")
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout
    assert "baseline.yaml::mine on busy PASSED" in done.stdout
    assert "1 passed, 2 deselected" in gate(repository, "-k", "mine").stdout


def test_pytest_fails_where_the_users_policy_moved_and_shows_what(repository):
    source = repository / "own_policies.py"
    source.write_text(OWN.replace("newest_first=True", "newest_first=False"))
    try:
        done = gate(repository)
    finally:
        source.write_text(OWN)
    assert done.returncode == 1
    assert "1 failed, 2 passed" in done.stdout
    assert re.search(r"mine +busy +attainment .* (worse|better)", done.stdout)
    assert "--update --reason" in done.stdout
    assert "Traceback" not in done.stdout


def test_pytest_names_a_baseline_that_is_not_there_or_not_one(repository, tmp_path):
    missing = run(repository, "pytest", "-p", "pytest_flowsim", "--flowsim-baseline", "nowhere.yaml")
    assert missing.returncode == 4
    assert "nowhere.yaml" in missing.stderr
    (tmp_path / "baseline.yaml").write_text("suite: {polices: [fcfs]}")
    broken = gate(tmp_path)
    assert broken.returncode == 2
    assert "did you mean 'policies'" in broken.stdout


def test_the_plugin_imports_nothing_of_flowsim_before_it_is_asked(tmp_path):
    (tmp_path / "test_lazy.py").write_text(
        "import sys\n"
        "def test_lazy(): assert not {name.split('.')[0] for name in sys.modules} & {'flowsim', 'simpy', 'pandas'}\n"
    )
    assert run(tmp_path, "pytest", "-p", "pytest_flowsim").returncode == 0


def test_markdown_folds_what_does_not_fail_away(tmp_path, recorded):
    suite = load(changed(tmp_path, recorded)).suite
    text = markdown(compare(CELL, [{"attainment": 0.5}], [{"attainment": 0.6}]), suite)
    assert "1 better" in text
    assert text.index("<details>") < text.index("| attainment |") < text.index("</details>")


def test_the_projects_own_baseline_has_every_shipped_policy():
    baseline = load(ROOT / "tests" / "baseline.yaml")
    named = {override for choice in baseline.suite.policies.values() for override in choice}
    assert {f"policy={path.stem}" for path in (CONF / "policy").glob("*.yaml")} <= named
    assert all(None not in baseline.of(cell) for cell in baseline.suite.cells)
    assert all(update["reason"] for update in baseline.updates)
