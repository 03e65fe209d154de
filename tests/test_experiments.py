"""The paper's reproduction: each experiment has its configuration, its results, its figure, its place in the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.paper import IMAGES, RESULTS, Claim, Experiment, crossing, kept, run
from experiments.reproduction import DOCUMENT, NAMES, experiments, page
from flowsim.config import CONF, build, compose

ROOT = Path(__file__).parents[1]
SMALL = ["workload.num_requests=40", "task.seeds=[0]", "task.precision=0.5"]


def test_every_experiment_is_a_module_and_a_configuration_and_no_configuration_is_without_a_module():
    shipped = {path.stem for path in (CONF / "experiment").glob("*.yaml")}
    assert set(NAMES) <= shipped
    assert {path.stem for path in (ROOT / "experiments").glob("*.py") if "EXPERIMENT = " in path.read_text()} == set(
        NAMES
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_configuration_of_an_experiment_composes_and_its_runs_can_be_built(name):
    config = compose([f"+experiment={name}"])
    assert build(config).requests
    assert config.task.grid


@pytest.mark.parametrize("experiment", experiments(), ids=NAMES)
def test_an_experiment_reads_its_kept_results_and_draws_them(experiment: Experiment):
    table, about = kept(experiment)
    assert about["command"] == f"python -m experiments.{experiment.name}"
    assert experiment.draw(table).axes
    claims = experiment.claims(table)
    assert claims
    assert all(isinstance(claim, Claim) and "nan" not in claim.ours for claim in claims)
    assert "nan" not in experiment.words(table)
    assert (IMAGES / f"paper_{experiment.name}.png").is_file()


def test_the_page_is_what_its_code_writes_from_the_kept_results():
    assert DOCUMENT.read_text(encoding="utf-8") == page(experiments())


@pytest.mark.slow
@pytest.mark.parametrize("experiment", experiments(), ids=NAMES)
def test_an_experiment_runs_from_its_configuration_to_the_table_it_reads(experiment: Experiment):
    extra = [one for one in SMALL if "precision" not in one or "precision" in compose_task(experiment.name)]
    table = run(experiment, jobs=2, extra=extra)
    assert list(table.columns) == list(experiment.columns)
    stored, _ = kept(experiment)
    assert set(experiment.shaped(table).columns) == set(stored.columns)


def compose_task(name: str) -> set[str]:
    return set(compose([f"+experiment={name}"]).task)


def test_a_crossing_lies_between_the_points_around_the_target():
    import pandas as pd

    table = pd.DataFrame({"x": [1, 1, 2, 2, 4], "attainment": [1.0, 0.96, 0.94, 0.9, 0.5]})
    assert crossing(table, "x") == pytest.approx(2 + 2 * 0.02 / 0.42)


def test_results_are_kept_for_experiments_that_there_are_and_for_no_other():
    assert {path.stem for path in RESULTS.glob("*.csv")} == set(NAMES)
