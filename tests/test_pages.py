"""Every command and recipe of the documentation works as it stands there; tests/test_docs.py has the README's."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"])
FENCED = re.compile(r"```(\w*)\n(.*?)```", flags=re.DOTALL)
SMALL = "workload.num_requests=100"
# Commands that run elsewhere, and where: they need a package, a file or minutes that this file has not.
ELSEWHERE = {
    "flowsim.profiler collect": "tests/test_collect.py, with torch",
    "flowsim.profiler pause": "tests/test_collect.py, with torch",
    "flowsim.profiler import": "tests/test_profiler_command.py, with the source's data",
    "flowsim.profiler fit": "tests/test_profiler_command.py",
    "gpu=my_": "with a profile that the commands above it make; tests/test_profiler_command.py",
    "flowsim.regress": "tests/test_regress.py",
    "experiments.": "studies of minutes; that they can be imported is tested below",
    "experiment=on_": "tests/test_study_backends.py, with the launchers' extras",
    "experiment=tune_": "tests/test_study_backends.py, with the extra `tune`",
    "FILE": "a placeholder",
    "$": "a variable of a CI job",
}


def commands(text: str) -> list[str]:
    """Every `python -m` line of shell blocks, joined over its continuations, without its comment."""
    lines = [
        line
        for kind, block in FENCED.findall(text)
        if kind in ("bash", "sh", "")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return [
        re.split(r"\s#\s", line)[0].strip() for line in lines if re.match(r"\s*python -m (flowsim|experiments)", line)
    ]


def elsewhere(command: str) -> bool:
    return any(part in command for part in ELSEWHERE)


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    arguments = shlex.split(command)[1:]
    is_run = arguments[1] == "flowsim" and not {"--help", "--cfg", "--hydra-help"} & set(arguments)
    sized = ("num_requests", "duration_s", "stress_mixed")  # the last has a size of its own
    small = [SMALL] if is_run and not any(one in argument for argument in arguments for one in sized) else []
    return subprocess.run(
        [sys.executable, *arguments, *small],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", [one for one in PAGES if one.stem != "troubleshooting"], ids=lambda page: page.stem)
def test_each_command_of_a_page_runs_and_so_does_the_python_of_those_that_teach(page, tmp_path, monkeypatch, capsys):
    text = page.read_text(encoding="utf-8")
    for command in filter(lambda one: not elsewhere(one), commands(text)):
        done = run(command, tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert "Traceback" not in done.stderr, command
    if page.stem in ("quickstart", "figures"):
        monkeypatch.chdir(tmp_path)
        for kind, block in FENCED.findall(text):
            if kind == "python":
                exec(block, {})
    if page.stem == "figures":
        assert (tmp_path / "attainment.pdf").read_bytes().startswith(b"%PDF")
    if page.stem == "quickstart":
        assert len([line for line in capsys.readouterr().out.splitlines() if line[:2] in ("0 ", "1 ", "2 ")]) == 3
        assert (tmp_path / "ttft.pdf").stat().st_size > 1000


def recipes() -> dict[str, list[tuple[str, str]]]:
    """The sections of every page that have Python and a configuration that names it, by title: their blocks."""
    found = {}
    for page in [*PAGES, ROOT / "README.md"]:
        for section in re.split(r"^#{2,3} ", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            blocks = FENCED.findall(section)
            configured = [text for kind, text in blocks if kind == "yaml" and text.startswith("# python -m flowsim ")]
            if configured and any(kind == "python" for kind, _ in blocks):
                found[f"{page.stem}: {section.splitlines()[0]}"] = blocks
    return found


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipes())
def test_each_recipe_works_when_it_is_followed(recipe, tmp_path):
    blocks = recipes()[recipe]
    configuration = next(text for kind, text in blocks if kind == "yaml" and text.startswith("# python -m flowsim "))
    named = re.findall(r"(?:_target_|order|admit): (?!flowsim)(\w+)\.", configuration)
    assert named, "it names what the Python above it defines"
    code = next(text for kind, text in blocks if kind == "python")
    (tmp_path / f"{named[0]}.py").write_text(code)
    command = configuration.splitlines()[0].removeprefix("# ")
    folder = re.search(r"--config-dir (\S+)", command)[1]
    group, choice = re.search(r"(policy|workload|router|report|task|cluster|predictor)=(\w+)", command).groups()
    (tmp_path / folder / group).mkdir(parents=True)
    (tmp_path / folder / group / f"{choice}.yaml").write_text(configuration)
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr


def troubles() -> list[tuple[list[str], list[str]]]:
    """The commands of each trouble, and the lines that they say."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    blocks = FENCED.findall(text)
    return [
        (commands(f"```bash\n{asked}```"), said.splitlines())
        for (kind, asked), (answer, said) in itertools.pairwise(blocks)
        if (kind, answer) == ("bash", "text")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "said"), troubles(), ids=lambda one: one[0].removeprefix("python -m flowsim "))
def test_each_trouble_is_told_in_the_words_of_its_page(asked, said, tmp_path):
    told = ""
    for command in asked:
        done = run(command, tmp_path)
        assert "Traceback" not in done.stderr
        told += done.stdout + done.stderr
    for line in said:
        assert line in told


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_module_that_a_page_runs_exists(page, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    for module in set(re.findall(r"python -m ((?:experiments|flowsim)[\w.]*)", page.read_text(encoding="utf-8"))):
        if module == "experiments.NAME":  # any of them
            continue
        assert importlib.util.find_spec(module.rstrip(".")) is not None, module


def test_each_page_is_in_the_sites_navigation_once(monkeypatch):
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import hooks

    pages = [*(path.name for path in (ROOT / "docs").glob("*.md")), "index.md", "later.md"]
    there = [page for sections in hooks.navigation(pages) for section in sections.values() for page in section]
    assert sorted(there) == sorted(pages)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_every_shipped_policy_is_on_it(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    policies = (tmp_path / "site/policies.html").read_text(encoding="utf-8")
    for path in (ROOT / "conf/policy").glob("*.yaml"):
        assert f'id="{path.stem}"' in policies
    reference = (tmp_path / "site/api/run.html").read_text(encoding="utf-8")
    assert "horizon_s" in reference
    assert not re.search(r"""(src|href)="https?://(?!arxiv|keepachangelog|github)[^"]*\.(js|css|woff2?)""", policies)
