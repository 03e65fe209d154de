"""Configurations: composed by Hydra, checked for names that nobody reads, and made into objects.

With `__main__` the only module that imports hydra. In a notebook::

    from flowsim.config import build, compose
    result = build(compose(["+policy=fcfs", "workload.rate_rps=3"])).run()
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import hydra
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from flowsim.core import Request
from flowsim.keep import ALL, check_keep
from flowsim.latency import LatencyModel, Predictor
from flowsim.load import offered_load
from flowsim.metrics import Result
from flowsim.names import shipped, unknown
from flowsim.overheads import with_overheads
from flowsim.policy import Policy
from flowsim.pool import Cluster, Pool
from flowsim.profile import load_profile
from flowsim.router import Router
from flowsim.sim import simulate
from flowsim.source import Source

__all__ = ["CONF", "ConfigError", "Setup", "build", "check", "compose", "explain", "make", "normalised"]

TYPES = {"model": str, "keep": str, "tp": int, "seed": int, "strict": bool, "quiet": bool, "fail_on_empty": bool}
LAUNCHERS = {"joblib": "joblib", "submitit_slurm": "slurm", "submitit_local": "slurm", "ray": "ray-launcher"}
TYPES |= {"horizon_s": float, "warmup_s": float, "cooldown_s": float}
GROUPS = ("policy", "workload", "predictor", "cluster", "router", "task", "report")


CONF = shipped("conf")
OmegaConf.register_new_resolver("pid", os.getpid, replace=True)


class ConfigError(ValueError):
    """A configuration that names something which does not exist, or leaves out what is needed."""


def normalised(overrides: Sequence[str]) -> list[str]:
    """Overrides as Hydra wants them, so that two spellings of a thing mean the same.

    `+policy=`, `+workload=`, `+cluster=` and so on choose like `policy=`. A key inside a group
    (`workload.rate_scale=2`) may be any that the chosen class or function reads, whether or not its file shows it:
    `build` names those that are not read. `experiment=` adds like `+experiment=`.
    """
    chosen = [re.sub(rf"^\+(?=({'|'.join(GROUPS)})=)", "", override) for override in overrides]
    chosen = [re.sub(r"^(?=experiment=)", "+", override) for override in chosen]
    return [f"++{one}" if re.match(rf"({'|'.join(GROUPS)})\.[\w.]+=", one) else one for one in chosen]


def compose(overrides: Sequence[str] = (), *, config_dir: str | Path | None = None) -> DictConfig:
    """The configuration of a run, as `python -m flowsim OVERRIDES` would compose it.

    Args:
        overrides: as on the command line.
        config_dir: a folder of your own with groups such as `policy/mine.yaml`.

    Raises:
        ConfigError: an unknown name, with near names and the choices.
    """
    arguments = normalised(overrides)
    try:
        return _compose(arguments, config_dir)
    except HydraException as error:
        raise ConfigError(explain(error)) from error


def _compose(overrides: Sequence[str], config_dir: str | Path | None) -> DictConfig:
    search = [f"hydra.searchpath=[file://{Path(config_dir).absolute()}]"] if config_dir else []
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return hydra.compose("config", overrides=[*overrides, *search])


@dataclass(frozen=True)
class Setup:
    """Everything one run needs, as objects."""

    requests: Sequence[Request] | Source
    policy: Policy
    latency: LatencyModel
    predictor: Callable[[LatencyModel], Predictor]
    cluster: Cluster | Pool
    router: Router
    seed: int
    strict: bool
    horizon_s: float
    warmup_s: float
    cooldown_s: float
    keep: str = ALL

    def run(
        self, progress: Callable[[int, float], None] | None = None, stop: Callable[[], bool] | None = None
    ) -> Result:
        """Simulates it; `progress` and `stop` as in `simulate`."""
        return simulate(
            self.requests,
            policy=self.policy,
            latency=self.latency,
            predictor=self.predictor,
            cluster=self.cluster,
            router=self.router,
            seed=self.seed,
            strict=self.strict,
            horizon_s=self.horizon_s,
            warmup_s=self.warmup_s,
            cooldown_s=self.cooldown_s,
            keep=self.keep,
            progress=progress,
            stop=stop,
        )

    def offered_load(self) -> float | None:
        """The share of the cluster's capacity that the workload asks for; None where arrivals depend on the run."""
        if not isinstance(self.requests, Sequence):
            return None
        cluster = Cluster.of(self.cluster)
        return offered_load(
            self.requests,
            [
                (
                    pool.instances,
                    pool.hardware(self.latency).bound(
                        pass_tokens=pool.pass_tokens, stops=(pool.policy or self.policy).stops
                    ),
                )
                for name, pool in cluster.pools.items()
                if name not in cluster.decoding
            ],
        )


def build(config: DictConfig, objects: Mapping[str, Any] | None = None) -> Setup:
    """The objects that a configuration names.

    Args:
        config: as `compose` answers it.
        objects: objects of your own in place of what the configuration names, under `policy`, `workload` (requests,
            or a function that makes them, called with the keys of `workload` that it takes), `predictor`,
            `cluster`, `router` or `latency`.

    Raises:
        ConfigError: a key that nothing reads, a missing value, an unknown name.
        ValueError: a value out of its range, an unreadable trace or profile.
    """
    own = dict(objects or {})
    _check_top(config)
    for key, kind in TYPES.items():
        _check_type(config[key], kind, key)
    check_keep(config.keep)
    if "latency" not in own:
        profile = with_overheads(load_profile(config.model, str(config.gpu)), config.overheads)
        own["latency"] = LatencyModel(profile, config.tp)
    latency: LatencyModel = own["latency"]
    offered = {"isolated_s": latency.isolated_s, "max_context_tokens": latency.profile.max_context_tokens}
    if "workload" not in own:
        own["workload"] = make(config, "workload", **offered)
    elif callable(own["workload"]):
        own["workload"] = _called(own["workload"], OmegaConf.to_container(config.workload, resolve=True), offered)
    for group in ("policy", "predictor", "cluster", "router"):
        if group not in own:
            own[group] = make(config, group)
    return Setup(
        requests=own["workload"],
        policy=own["policy"],
        latency=latency,
        predictor=own["predictor"],
        cluster=own["cluster"],
        router=own["router"],
        seed=config.seed,
        strict=config.strict,
        horizon_s=config.horizon_s,
        warmup_s=config.warmup_s,
        cooldown_s=config.cooldown_s,
        keep=config.keep,
    )


def make(config: DictConfig, group: str, **offered: Any) -> Any:
    """The object of one group, after a check that its class or function reads every key given.

    What is `offered` is passed where it is read and the configuration says nothing else.
    """
    node = config[group]
    _check_keys(node, group)
    names, _, _ = _parameters(_target(node, group))
    wanted = {name: value for name, value in offered.items() if name in names and node.get(name) is None}
    try:
        return instantiate(node, _convert_="all", **wanted)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{_full_key(error)} is needed: give {_full_key(error)}=VALUE") from error
    except InstantiationException as error:
        if isinstance(error.__cause__, ValueError | OSError):
            raise error.__cause__ from error
        raise ConfigError(f"{group}: {error.__cause__ or error}") from error


def check(config: DictConfig) -> None:
    """Refuses what `build` would refuse before it makes anything: keys that nothing reads, values of a wrong type.

    Raises:
        ConfigError: with near names and what is allowed.
    """
    _check_top(config)
    for key, kind in TYPES.items():
        _check_type(config[key], kind, key)
    check_keep(config.keep)
    for group in GROUPS:
        _check_keys(config._get_node(group), group)


def _called(function: Callable[..., Any], settings: Any, offered: Mapping[str, Any]) -> Any:
    """What a workload function of one's own makes, given the settings that it takes; its defaults where they are
    null."""
    names, _, any_key = _parameters(function)
    given = {**offered, **{name: value for name, value in settings.items() if value is not None}}
    chosen = {name: value for name, value in given.items() if name in names or (any_key and name in settings)}
    return function(**{name: value for name, value in chosen.items() if not name.startswith("_")})


@cache
def known_keys() -> frozenset[str]:
    """The groups and the scalars beside them."""
    return frozenset({*map(str, OmegaConf.load(CONF / "config.yaml")), *GROUPS} - {"defaults", "hydra"})


def _check_top(config: DictConfig) -> None:
    for key in config:
        if key not in known_keys():
            raise ConfigError(unknown("key", key, known_keys()))


def _check_keys(node: Any, where: str) -> None:
    """Hydra takes `+workload.rte_rps=3` silently; this does not."""
    if OmegaConf.is_list(node):
        for index, item in enumerate(node._iter_ex(resolve=False)):
            _check_keys(item, f"{where}[{index}]")
    if not OmegaConf.is_dict(node):
        return
    if "_target_" in node:
        target = _target(node, where)
        names, types, any_key = _parameters(target)
        for key in node:
            if not any_key and key not in names and not str(key).startswith("_"):
                raise ConfigError(unknown("key", f"{where}.{key}", [f"{where}.{name}" for name in names]))
            if key in types and not OmegaConf.is_missing(node, key):
                _check_type(node[key], types[key], f"{where}.{key}")
    for key in node:
        if not OmegaConf.is_missing(node, key):
            _check_keys(node._get_node(key), f"{where}.{key}")


def _target(node: DictConfig, where: str) -> Callable[..., Any]:
    """The class or function that a node names; a fault in its module is told with file and line."""
    name = str(node._get_node("_target_")._value())  # type: ignore[union-attr]
    module, _, attribute = name.rpartition(".")
    try:
        target: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        hint = f"; it is looked for in {', '.join(map(str, sys.path[-2:]))} and where packages are (PYTHONPATH)"
        raise ConfigError(f"{where}._target_ {name!r} cannot be imported: {error}{hint}") from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith(("<", sys.prefix, sys.base_prefix))]
        last = (own or frames)[-1]
        place = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
        kind = type(error).__name__
        raise ConfigError(f"{where}._target_ {name!r} cannot be imported: {kind}: {error}{place}") from error
    return target


def _parameters(target: Callable[..., Any]) -> tuple[list[str], dict[str, Any], bool]:
    """The names that a class or function takes, their types where stated, and whether it takes any other too."""
    parameters = inspect.signature(target).parameters.values()
    function = target.__init__ if inspect.isclass(target) else target
    try:
        types = get_type_hints(function)
    except (NameError, TypeError):
        types = {}  # annotations that only a type checker can read
    return [p.name for p in parameters], types, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _check_type(value: Any, annotation: Any, key: str) -> None:
    """Raises where a plain number, switch or text is asked for and something else was given."""
    allowed = set(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else {annotation}
    if not allowed <= {int, float, bool, str, Path, type(None)}:
        return
    if value is None and type(None) in allowed:
        return
    if float in allowed:
        allowed |= {int}
    if type(value) not in allowed:
        names = {
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            str: "a text",
            Path: "a path",
        }
        kinds = " or ".join(names[kind] for kind in (float, int, bool, str) if kind in allowed)
        hint = " (written inf on the command line)" if value == ".inf" else ""
        raise ConfigError(
            f"{key} is {value!r}{hint}; it must be {kinds.replace('a number or a whole number', 'a number')}"
        )


def explain(error: Exception) -> str:
    """Hydra's complaint about a configuration, in one sentence with near names and the choices."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        extra = LAUNCHERS.get(name) if group == "hydra/launcher" else None
        hint = f"; it comes with the extra `{extra}`: pip install 'flowsim-prefill[{extra}]'" if extra else ""
        return unknown(group or "config", name, error.options) + hint
    text = str(error).split("\n")[0]
    found = re.search(r"Could not override '([^']+)'", text)
    if isinstance(error, ConfigCompositionException) and found:
        return unknown("key", found.group(1), known_keys())
    if "Ambiguous value" in text:
        return f"{text}; for a run of each value, add -m"
    if isinstance(error, OverrideParseException):
        given = str(error.override).removeprefix("++")
        return (
            f"cannot read {given!r}: KEY=VALUE is expected, and quotes around a value with blanks, brackets, commas "
            """or letters beyond ASCII, as in 'workload.path="a b.csv"'"""
        )
    if isinstance(error, OmegaConfBaseException):
        text = str(error.msg).split("\n")[0]
    return text


def _full_key(error: OmegaConfBaseException) -> str:
    return str(error.full_key or error.key)
