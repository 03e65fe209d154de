"""The command: `python -m flowsim +policy=flowprefill +workload=mixed`."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import flowsim

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["main"]

HELP = """\
flowsim: a simulator for research on prefill scheduling in LLM serving

  python -m flowsim +policy=flowprefill +workload=mixed       run one simulation
  python -m flowsim policy=fcfs workload.rate_rps=8 seed=3    any key of the configuration, changed
  python -m flowsim -m policy=fcfs,chunked_2k,flowprefill     a run for each
  python -m flowsim --cfg job                                 print the configuration, run nothing
  python -m flowsim --hydra-help                              Hydra's own options

{groups}

Models and GPUs (model=, gpu=, tp=):
{profiles}

Often changed: workload.rate_rps, workload.num_requests, workload.slo_scale, policy.stops, cluster.instances,
seed, hydra.run.dir=DIR (where the results go), quiet=true.
"""


def main() -> None:
    """Runs the command; exits with 0, 1 (no request finished, a study's runs failed), 2 (a mistake), 130 (Ctrl-C)."""
    arguments = sys.argv[1:]
    try:
        if {"--help", "-h"} & set(arguments):
            print(_help(_config_dir(arguments)), flush=True)
            return
        if "--version" in arguments:
            print(f"flowsim {flowsim.__version__}", flush=True)
            return
        wants_traceback = os.environ.setdefault("HYDRA_FULL_ERROR", "0") == "1"
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises, and the complaint is worded here
        code = _run(arguments, wants_traceback)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # whoever read our output has left; nothing more can be said there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code)


def _run(arguments: list[str], wants_traceback: bool) -> int:
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from flowsim.config import CONF, explain, normalised
    from flowsim.core import FailedRunsError, PolicyError

    mistakes = (HydraException, OmegaConfBaseException, PolicyError, ValueError, OSError)

    def failed(error: Exception) -> int:
        if wants_traceback or isinstance(error, BrokenPipeError):
            raise error
        print(f"flowsim: {explain(error)}", file=sys.stderr)
        return 2

    codes: list[int] = []
    here = os.getpid()

    def job(config: DictConfig) -> None:
        sys.path += [path for path in own_modules if path not in sys.path]
        if os.getpid() != here:  # a launcher's worker: what goes wrong is told to the command, once the others ended
            _job_elsewhere(config, config_dir)
            return
        try:
            codes.append(_job(config, config_dir))
        except FailedRunsError as error:
            print(f"flowsim: {error}", file=sys.stderr)
            codes.append(1)
        except mistakes as error:  # the other runs of a sweep go on
            codes.append(failed(error))

    # a user's own modules lie where the command is given, or beside the folder of their configurations
    config_dir = _config_dir(arguments)
    own_modules = [str(Path.cwd())] + ([str(Path(config_dir).absolute().parent)] if config_dir else [])
    sys.path += own_modules
    sys.argv = [sys.argv[0], *normalised(arguments)]
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("flowsim").setLevel(logging.INFO)
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    except FailedRunsError as error:
        print(f"flowsim: {error}", file=sys.stderr)
        codes.append(1)
    except mistakes as error:
        codes.append(failed(error))
    return max(codes, default=0)


def _job_elsewhere(config: DictConfig, config_dir: str | None) -> None:
    """One run in a launcher's worker.

    Raises:
        FailedRunsError: no request finished, or runs of a study failed.
        ValueError: any mistake, in words that need no class which the command may not know.
    """
    from hydra.core.hydra_config import HydraConfig

    from flowsim.config import explain
    from flowsim.core import FailedRunsError

    number = f"job {HydraConfig.get().job.num}"
    try:
        code = _job(config, config_dir)
    except FailedRunsError:
        raise
    except Exception as error:
        raise ValueError(f"{number}: {explain(error)}") from None
    if code:
        raise FailedRunsError(f"{number}: no request finished")


def _config_dir(arguments: list[str]) -> str | None:
    """The folder that `--config-dir` (or `-cd`) names."""
    for place, argument in enumerate(arguments):
        option, _, value = argument.partition("=")
        if option in ("--config-dir", "-cd"):
            return value or next(iter(arguments[place + 1 :]), None)
    return None


def _job(config: DictConfig, config_dir: str | None) -> int:
    """One run of the configuration; returns 0, or 1 where no request finished and that is not fine."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    from flowsim.config import build, make

    setup, report = build(config), make(config, "report")
    runtime = HydraConfig.get().runtime
    # a study composes variants of what was asked for
    task = make(config, "task", overrides=list(HydraConfig.get().overrides.task), config_dir=config_dir)
    folder = Path(runtime.output_dir)
    OmegaConf.save(config, folder / "config.yaml", resolve=True)
    chosen = runtime.choices
    title = f"{_systems(config, chosen)} on {chosen['workload']}, {config.model} on {gpus_of(config)}"
    finished: int = task(setup, title=title, report=report, folder=folder, quiet=config.quiet)
    if finished:
        return 0
    print("flowsim: no request finished", file=sys.stderr)
    return 1 if config.fail_on_empty else 0


def _systems(config: DictConfig, chosen: Mapping[str, str]) -> str:
    """The policy that runs, or those of the pools that have their own."""
    names = config.cluster.get("pools") or {}
    places = [f"policy@cluster.pools.{name}.policy" for name in names] or ["policy@cluster.policy"]
    return " and ".join(dict.fromkeys(chosen.get(place, chosen["policy"]) for place in places))


def gpus_of(config: DictConfig) -> str:
    """How many GPUs of which kind there are in all."""
    counts: Counter[str] = Counter()
    for pool in (config.cluster.get("pools") or {"": config.cluster}).values():
        counts[str(pool.get("gpu") or config.gpu)] += pool.get("instances", 1) * (pool.get("tp") or config.tp)
    return " and ".join(f"{count} x {gpu}" for gpu, count in counts.items())


def _help(config_dir: str | None) -> str:
    """What can be chosen, read from the shipped folders and the user's; Hydra is not needed for it."""
    from flowsim.names import shipped
    from flowsim.profile import MODEL_ALIASES, profile_table

    names = ("policy", "workload", "predictor", "cluster", "router", "task", "report")
    folders = [shipped("conf")] + ([Path(config_dir)] if config_dir else [])
    choices = {
        name: sorted({path.stem for folder in folders for path in (folder / name).glob("*.yaml")}) for name in names
    }
    groups = "\n".join(f"{name + '=':<11} {', '.join(sorted(found))}" for name, found in choices.items())
    experiments = sorted({path.stem for folder in folders for path in (folder / "experiment").glob("*.yaml")})
    groups += f"\n+experiment= {', '.join(experiments)}"
    profiles = "\n".join(
        f"  {model:<16} {gpu:<12} tp {', '.join(map(str, degrees))}" for model, gpu, degrees in profile_table()
    )
    aliases = "".join(f"\n  {alias:<16} the same as {model}" for alias, model in MODEL_ALIASES.items())
    return HELP.format(groups=groups, profiles=profiles + aliases)


if __name__ == "__main__":
    main()
