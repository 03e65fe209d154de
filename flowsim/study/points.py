"""One point of a study: a configuration and a seed, made into a row of figures. Knows no study and no worker."""

from __future__ import annotations

import hashlib
import inspect
import json
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import util
from pathlib import Path
from time import perf_counter
from typing import Any

import cloudpickle

from flowsim.config import Setup
from flowsim.metrics import Result
from flowsim.names import shipped
from flowsim.profile import MODEL_ALIASES
from flowsim.variants import Settings, make_setup

__all__ = ["Figures", "Measure", "Point", "Record", "Work", "columns", "flat", "run_point"]

Figures = dict[str, Any]
Measure = Callable[[Result], Mapping[str, Any]]
Work = Callable[[Setup], Mapping[str, Any]]
"""What makes figures of a set-up without running it."""
NOT_OF_A_RUN = ("task", "report", "quiet", "fail_on_empty")  # keys that change no table of a run
NOT_OF_A_RESULT = ("profiler", "report", "study", "regress")  # folders of code that change none


@dataclass(frozen=True)
class Point:
    """What one run needs, and `place`, its number in its study.

    `objects` stand in place of configured groups; `measure` adds figures of its own to those of the summary. With
    `work` its figures are what that makes of the set-up, and there is no run.
    """

    place: int
    settings: Settings
    objects: Mapping[str, Any]
    measure: Measure | None = None
    work: Work | None = None

    @property
    def key(self) -> str:
        """A digest of all that the figures depend on: settings, objects, the files that they name, and the code."""
        of_the_run = {name: value for name, value in self.settings.items() if name not in NOT_OF_A_RUN}
        parts = [json.dumps(of_the_run, sort_keys=True, default=str), _code_digest(), _profile_digest(self.settings)]
        parts += [_file_digest(path) for path in _files(of_the_run)]
        parts += [f"{group} {_object_digest(thing)}" for group, thing in sorted(self.objects.items())]
        parts += [_object_digest(own) for own in (self.measure, self.work) if own is not None]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Record:
    """What became of a point: its figures, or the error that it ended with."""

    place: int
    figures: Figures | None
    error: str | None
    wall_s: float


def run_point(point: Point) -> Record:
    """Runs it; whatever goes wrong in it is its record's error."""
    began_s = perf_counter()
    try:
        setup = make_setup(point.settings, point.objects)
        figures = _simulated(setup, point.measure) if point.work is None else flat(point.work(setup))
        json.dumps(figures)
    except (Exception, SystemExit) as error:
        return Record(point.place, None, f"{type(error).__name__}: {error}", perf_counter() - began_s)
    return Record(point.place, figures, None, perf_counter() - began_s)


def _simulated(setup: Setup, measure: Measure | None) -> Figures:
    result = setup.run()
    figures = flat(result.summary())
    return figures if measure is None else figures | flat(measure(result))


def flat(nested: Any, prefix: str = "") -> Figures:
    """Nested figures under dotted names; the members of a list under their place; numpy's numbers as Python's."""
    if isinstance(nested, list | tuple):
        nested = dict(enumerate(nested))
    if not isinstance(nested, Mapping):
        return {prefix: nested.item() if hasattr(nested, "item") else nested}
    found: Figures = {}
    for name, value in nested.items():
        found |= flat(value, f"{prefix}.{name}" if prefix else str(name))
    return found


def columns(settings: Settings) -> Figures:
    """The settings of a run under dotted names, a list as its JSON text."""
    found: Figures = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if key not in ("_target_", "_partial_"):
                    add(f"{name}.{key}", inner)
        else:
            found[name] = json.dumps(value) if isinstance(value, list) else value

    for name, value in settings.items():
        if name not in NOT_OF_A_RUN:
            add(name, value)
    return found


def _files(nested: Any) -> Iterator[Path]:
    """The files that settings name, by their path or as the module of a class or function that is not ours."""
    if isinstance(nested, Mapping):
        nested = list(nested.values())
    if isinstance(nested, list):
        for value in nested:
            yield from _files(value)
    elif isinstance(nested, str) and "." in nested:
        path = Path(nested).expanduser()
        if path.is_file():
            yield path
        elif all(part.isidentifier() for part in nested.split(".")) and not nested.startswith("flowsim."):
            yield from _module_files(nested.split("."))


def _module_files(parts: list[str]) -> Iterator[Path]:
    """The files of a dotted name's module and of the packages above it; none where there is no such module."""
    spec = util.find_spec(parts[0]) if parts[0] not in ("__main__", *sys.builtin_module_names) else None
    if spec is None or spec.origin is None:
        return
    path = Path(spec.origin)
    for part in parts[1:]:
        if path.is_file():
            yield path
        inside = [path.parent / f"{part}.py", path.parent / part / "__init__.py"]
        found = next((one for one in inside if path.name == "__init__.py" and one.is_file()), None)
        if found is None:
            return
        path = found


def _file_digest(path: Path) -> str:
    stat = path.stat()
    return f"{path.absolute()} {_content_digest(path, stat.st_mtime_ns, stat.st_size)}"


@lru_cache(maxsize=1024)
def _content_digest(path: Path, _mtime_ns: int, _size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _profile_digest(settings: Settings) -> str:
    model = str(settings.get("model"))
    path = shipped("profiles") / MODEL_ALIASES.get(model, model) / f"{settings.get('gpu')}.yaml"
    return _file_digest(path).rpartition(" ")[2] if path.is_file() else ""


@lru_cache(maxsize=1)
def _code_digest() -> str:
    """Of the simulator's own code and tables: what was run by other code is run again."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        inside = path.relative_to(package)
        if path.suffix in (".py", ".yaml") and inside.parts[0] not in (*NOT_OF_A_RESULT, "conf", "profiles"):
            digest.update(str(inside).encode() + path.read_bytes())
    return digest.hexdigest()


def _object_digest(thing: Any) -> str:
    """Of an object's class or function, its source where there is one, and its state.

    State that pickles differently each time costs a run that could have been spared, never a stale figure.
    """
    if isinstance(thing, partial):
        given = [_object_digest(one) for one in (thing.func, *thing.args)]
        return hashlib.sha256("\n".join([*given, repr(sorted(thing.keywords.items()))]).encode()).hexdigest()
    kind = thing if inspect.isclass(thing) or inspect.isroutine(thing) else type(thing)
    try:
        source = inspect.getsource(inspect.getmodule(kind) or kind)
    except (OSError, TypeError):
        source = ""
    try:
        state = pickle.dumps(thing)
    except Exception:  # a lambda, or a class of a notebook
        state = cloudpickle.dumps(thing)
    return hashlib.sha256(f"{kind.__module__}.{kind.__qualname__}\n{source}".encode() + state).hexdigest()
