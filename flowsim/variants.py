"""One configuration and its variants: composed by Hydra once for each choice of groups, then changed key by key.

Hydra takes a fifth of a second to compose; setting a key takes a millisecond. This module must not know what is run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flowsim.config import CONF, GROUPS, ConfigError, Setup, build, check, explain, known_keys, normalised
from flowsim.names import unknown

__all__ = ["OBJECTS", "Settings", "choices_of", "is_key", "known_choices", "make_setup", "variant"]

OBJECTS = ("policy", "workload", "predictor", "cluster", "router", "latency")
"""Where an object may stand in place of a configuration."""
CHOICES = (*GROUPS, "experiment")
Settings = dict[str, Any]
"""A configuration as plain, resolved containers."""


def known_choices() -> list[str]:
    """The groups and scalars that a configuration has, and what objects may stand for."""
    return sorted({*known_keys(), *CHOICES, *OBJECTS})


def is_key(name: str) -> bool:
    """Whether it names a key of the configuration: a group, a scalar, or something inside a group."""
    return name.split(".")[0] in known_choices()


def variant(
    overrides: Sequence[str],
    changes: Mapping[str, Any],
    *,
    objects: Mapping[str, Any],
    config_dir: str | Path | None = None,
) -> tuple[Settings, dict[str, str]]:
    """The settings of a run, and the name of the choice in each group.

    Args:
        overrides: as on the command line.
        changes: key -> value, after them. A text for a group chooses in that group.
        objects: what stands in place of a group; its name of choice is left out.
        config_dir: a folder of your own with groups.

    Raises:
        ConfigError: an unknown name or key, a value of a wrong type.
    """
    named = {key: value for key, value in changes.items() if key in CHOICES and isinstance(value, str)}
    chosen = tuple(f"{'+' * (key == 'experiment')}{key}={value}" for key, value in named.items())
    base, choices = _composed((*overrides, *chosen), None if config_dir is None else str(config_dir))
    config = copy.deepcopy(base)
    try:
        for key, value in changes.items():
            if key not in named:
                OmegaConf.update(config, key, value, merge=False, force_add=True)
        check(config)
        settings: Settings = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    return settings, {group: name for group, name in choices.items() if group not in objects}


def make_setup(settings: Settings, objects: Mapping[str, Any]) -> Setup:
    """The objects of a run; those given are copied, so that no run sees what another left in them."""
    return build(OmegaConf.create(settings), copy.deepcopy(dict(objects)))


def choices_of(group: str, config_dir: str | Path | None = None) -> list[str]:
    """The names that can be chosen in a group."""
    folders = [CONF, *([Path(config_dir)] if config_dir else [])]
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


@lru_cache(maxsize=256)
def _composed(overrides: tuple[str, ...], config_dir: str | None) -> tuple[DictConfig, dict[str, str]]:
    search = [f"hydra.searchpath=[file://{Path(config_dir).absolute()}]"] if config_dir else []
    arguments = [*normalised(overrides), *search]
    try:
        with _hydra_set_aside(), hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            config = hydra.compose("config", overrides=arguments, return_hydra_config=True)
    except HydraException as error:
        raise ConfigError(explain(error)) from error
    aside = ("hydra", "task", "report", "experiment")
    choices = {
        str(group): str(name)
        for group, name in config.hydra.runtime.choices.items()
        if str(group).split("/")[0] not in aside
    }
    own = {key: config._get_node(key) for key in config if key != "hydra"}
    for key in own:
        if key not in known_keys():
            raise ConfigError(unknown("key", key, known_keys()))
    return OmegaConf.create(own), choices


@contextmanager
def _hydra_set_aside() -> Iterator[None]:
    """Lets Hydra compose inside a command that Hydra runs."""
    state = GlobalHydra.instance()
    running, state.hydra = state.hydra, None
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = running
