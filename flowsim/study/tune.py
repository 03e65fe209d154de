"""`task=tune`: a policy's parameters tuned for goodput by Optuna, and the best held against the policy as it was.

The search sees `seeds`; what it found is measured again with `held_out_seeds`, for the best of many is flattered by the
seeds that chose it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flowsim.bounded import checked_boundable
from flowsim.report import studies as figures
from flowsim.study.attained import checked_target
from flowsim.study.cells import checked_seeds
from flowsim.study.rates import Goodput, goodput
from flowsim.study.telling import bound_words, bounded, draw, rows_of, studied, write_json
from flowsim.study.workers import Progress

__all__ = ["Tune"]


@dataclass(frozen=True)
class Tune:
    """Tunes `space`: a key to a list of choices, or to `{low, high}` with `log: true` or a `step`.

    Writes `tune.json` (best parameters, goodput before and after, also with held-out seeds), `trials.csv`, `tune.png`
    and `trials.log`, from which a rerun goes on. With `bound` the held-out goodput of the best stands beside what no
    schedule exceeds.

    Raises:
        ValueError: Optuna is not installed, an empty or malformed space, or with `bound` a set-up that has none.
    """

    space: Mapping[str, Any]
    trials: int = 30
    target: float = 0.9
    per_class: bool = False
    seeds: Sequence[int] = (0, 1, 2)
    held_out_seeds: Sequence[int] = (100, 101, 102)
    precision: float = 0.02
    bound: bool = False
    jobs: int = -1
    backend: str = "loky"
    overrides: Sequence[str] = ()
    config_dir: str | Path | None = None

    def __post_init__(self) -> None:
        checked_target(self.target)
        checked_seeds(self.seeds)
        checked_seeds(self.held_out_seeds)
        if not self.space:
            raise ValueError("task.space is empty; give it parameters, such as {policy.batching.tokens: [1024, 2048]}")
        if self.trials < 1:
            raise ValueError(f"task.trials is {self.trials}; it must be at least 1")

    def __call__(self, setup: Any, *, title: str, report: Any, folder: Path, quiet: bool) -> int:
        """Tunes; returns how many trials there are."""
        if self.bound:
            checked_boundable(setup)
        study = self._study(folder)
        asked = [one for one in study.trials if one.state.is_finished()]

        def tune(progress: Progress | None) -> Goodput:
            for done in range(len(asked), self.trials):
                trial = study.ask()
                chosen = {key: _suggested(trial, key, space) for key, space in self.space.items()}
                rate_rps = float(self._both({"trial": chosen}, self.seeds, folder).table.goodput_rps[0])
                study.tell(trial, 0.0 if math.isnan(rate_rps) else rate_rps)
                if progress is not None:
                    progress(done + 1, self.trials + 2)
            best = {"best": dict(study.best_params), "as it was": {}}
            found = self._both(best, self.held_out_seeds, folder, bound=self.bound)
            if progress is not None:
                progress(self.trials + 2, self.trials + 2)
            return found

        held_out = studied(tune, folder, quiet)
        before = self._both({"as it was": {}}, self.seeds, folder).table.goodput_rps[0]
        best, was = rows_of(held_out.table)
        table = study.trials_dataframe(attrs=("number", "value", "params")).rename(columns={"value": "goodput_rps"})
        table.columns = [str(name).removeprefix("params_") for name in table.columns]
        table.to_csv(folder / "trials.csv", index=False)
        write_json(
            folder / "tune.json",
            {
                "best": dict(study.best_params),
                "goodput_rps": study.best_value,
                "goodput_before_rps": None if math.isnan(before) else float(before),
                "held_out": {
                    "seeds": list(self.held_out_seeds),
                    "goodput_rps": best["goodput_rps"],
                    "ci": [best["goodput_rps_low"], best["goodput_rps_high"]],
                    "goodput_before_rps": was["goodput_rps"],
                    "ci_before": [was["goodput_rps_low"], was["goodput_rps_high"]],
                    **bounded(best),
                },
                "target": self.target,
                "num_requests": best["num_requests"],
                "trials": rows_of(table),
            },
        )
        draw(report, folder / "tune", lambda: figures.tuning(table, before, title=title))
        if not quiet:
            console = Console(markup=False)
            words = ", ".join(f"{key}={value}" for key, value in study.best_params.items())
            for line in (
                title,
                f"best of {len(table)} trials: {words}",
                f"goodput {study.best_value:.2f} req/s, {before:.2f} as it was",
                f"with held-out seeds {_words(best)}, {_words(was)} as it was",
                *bound_words(best, "rps"),
                f"results in {folder}",
            ):
                console.print(line, highlight=False, soft_wrap=True)
        return len(table)

    def _study(self, folder: Path) -> Any:
        try:
            import optuna
            from optuna.storages import JournalStorage
            from optuna.storages.journal import JournalFileBackend
        except ImportError as error:
            raise ValueError("task=tune needs the extra `tune`: pip install 'flowsim-prefill[tune]'") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        folder.mkdir(parents=True, exist_ok=True)
        return optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(folder / "trials.log"))),
            study_name="tune",
            sampler=optuna.samplers.TPESampler(seed=0),
            direction="maximize",
            load_if_exists=True,
        )

    def _both(
        self, chosen: Mapping[str, Mapping[str, Any]], seeds: Sequence[int], folder: Path, *, bound: bool = False
    ) -> Goodput:
        return goodput(
            self.overrides,
            {"parameters": chosen},
            target=self.target,
            per_class=self.per_class,
            seeds=seeds,
            precision=self.precision,
            bound=bound,
            folder=folder,
            jobs=self.jobs,
            backend=self.backend,
            config_dir=self.config_dir,
        )


def _suggested(trial: Any, key: str, space: Any) -> Any:
    """A value of one parameter, drawn by Optuna."""
    if isinstance(space, list | tuple):
        return trial.suggest_categorical(key, list(space))
    if not isinstance(space, Mapping) or not {"low", "high"} <= set(space) <= {"low", "high", "log", "step"}:
        raise ValueError(f"task.space: {key} is {space!r}; give choices, or {{low: 512, high: 8192, log: true}}")
    whole = isinstance(space["low"], int) and isinstance(space["high"], int)
    suggest = trial.suggest_int if whole else trial.suggest_float
    return suggest(key, space["low"], space["high"], **{name: space[name] for name in ("log", "step") if name in space})


def _words(row: Mapping[str, Any]) -> str:
    if row["goodput_rps"] is None:
        return "none"
    ends = [row["goodput_rps_low"], row["goodput_rps_high"]]
    return f"{row['goodput_rps']:.2f}" + ("" if None in ends else f" ({ends[0]:.2f} to {ends[1]:.2f})")
