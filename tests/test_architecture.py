"""The direction of imports, read from the source of every module: who may know whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import flowsim

PACKAGE = Path(flowsim.__file__).parent
MAX_LINES = 400

# Lowest first. A module may import modules of lower layers, and of its own where that makes no cycle.
# A folder (workload, profiler, report) counts as one module.
LAYERS = (
    ("timeline",),
    ("core",),
    (
        "names",
        "markup",
        "profile",
        "curves",
        "overheads",
        "latency",
        "load",
        "predictor",
        "kv",
        "queue",
        "workload",
        "profiler",
    ),
    ("view", "policy", "batching", "layered", "bound", "feasible", "rivals", "granularity", "hybrid"),
    (
        "log",
        "contract",
        "lockstep",
        "record",
        "stage",
        "decoding",
        "events",
        "instance",
        "router",
        "feasible_routing",
        "migration",
        "pool",
        "source",
    ),
    ("link", "proxied", "failures", "moving", "cluster"),
    (
        "tokens",
        "law",
        "totals",
        "keep",
        "tables",
        "tabulate",
        "metrics",
        "summary",
        "by_class",
        "check_layers",
        "check_transfers",
        "check_migrations",
        "check",
    ),
    ("sim",),
    ("testing",),
    ("config", "variants", "report", "bounded"),
    ("study",),
    ("task", "explain", "appraise", "capacity"),
    ("flowsim", "regress", "__main__"),
)
# Modules that may know less than their layer allows.
ONLY = {
    "names": set(),
    "markup": set(),
    "load": {"core", "latency"},
    "by_class": set(),
    "totals": {"log"},
    "keep": {"log", "names", "totals"},
    "tabulate": {"core", "latency", "log", "tables", "timeline", "tokens"},
    "summary": {"core", "log", "totals"},
    "kv": set(),
    "queue": set(),
    "log": set(),
    "profiler": {"latency", "names", "profile", "timeline"},
    "profile": {"markup", "names"},
    "overheads": {"names", "profile"},
    "curves": {"profile"},
    "latency": {"curves", "profile", "timeline"},
    "workload": {"core", "names"},
    "policy": {"core", "markup", "names", "queue", "timeline"},
    "predictor": {"latency", "names", "profile"},
    "batching": {"core", "policy", "queue", "timeline"},
    "layered": {"batching", "core", "policy", "queue"},
    "rivals": {"core", "policy", "queue"},
    "granularity": {"core", "names", "policy", "timeline"},
    "feasible": {"core", "names", "policy", "queue", "timeline"},
    "bound": {"core", "latency", "names", "timeline"},
    "contract": {"core", "names", "policy", "timeline", "view"},
    "lockstep": {"core", "events"},
    "record": {"core", "log", "timeline"},
    "stage": {"core", "kv", "latency", "log", "record", "timeline", "view"},
    "decoding": {"core", "latency", "stage", "timeline", "view"},
    "pool": {"latency", "names", "policy", "profile", "router"},
    "router": {"core", "names", "policy"},
    "hybrid": {"core", "policy", "queue", "timeline"},
    "link": {"core", "instance", "log", "pool"},
    "proxied": {"core", "events", "instance", "latency", "view"},
    "failures": {"core", "instance", "log", "pool", "proxied", "record", "timeline"},
    "law": set(),
    "tables": {"log"},
    "events": {"timeline"},
    "feasible_routing": {"core", "feasible", "policy", "router"},
    "migration": {"core", "feasible", "feasible_routing", "policy", "router"},
    "moving": {"events", "log", "proxied", "router", "stage"},
    "explain": {"core", "log", "metrics", "report"},
    "source": {"core", "events"},
    "regress": {"check", "config", "core", "flowsim", "names"},
    "report": {"by_class", "core", "log", "metrics", "names", "profile", "summary"},
    "variants": {"config", "names"},
    "bounded": {"bound", "config", "core", "latency", "pool"},
    "study": {"bounded", "config", "core", "metrics", "names", "profile", "report", "variants"},
    "flowsim": {
        "batching",
        "core",
        "latency",
        "metrics",
        "policy",
        "pool",
        "profile",
        "sim",
        "study",
        "summary",
        "timeline",
        "workload",
    },
}
# Packages that only some modules may import, at the top or inside a function.
KEPT_TO = {
    "simpy": {"events", "instance", "failures", "link", "lockstep", "moving", "proxied", "source"},
    "hydra": {"config", "variants", "__main__"},
    "omegaconf": {"config", "variants", "__main__"},
    "joblib": {"study"},
    "cloudpickle": {"study"},
    "sortedcontainers": {"queue"},
    "scipy": {"bound", "profiler", "report", "study"},
    "matplotlib": {"profiler", "report"},
    "rich": {"appraise", "capacity", "profiler", "regress", "report", "study", "task"},
    "torch": {"profiler"},
}
PROFILER_PACKAGES = {"matplotlib", "numpy", "pandas", "pyarrow", "rich", "scipy", "torch", "yaml"}
# Modules of the profiler that need torch; the others, and the commands themselves, work without it.
PROFILER_TORCH = {"bench", "kernels", "layer", "measuring", "operators", "plain", "preemption", "timing"}


def sources() -> dict[str, str]:
    """The dotted name below `flowsim` of every module, and its source; `__init__` is its folder's name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts) or "flowsim"] = path.read_text(encoding="utf-8")
    return found


def imported(module: str, source: str) -> Iterator[str]:
    """The dotted names of all that a module imports, wherever in its source it does."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import in line {node.lineno}"
            for alias in node.names:  # `from flowsim import policy` may name a module
                named = node.module == "flowsim" and f"flowsim.{alias.name}" in ours()
                yield f"flowsim.{alias.name}" if named else str(node.module)


def ours() -> set[str]:
    return {f"flowsim.{part}" for layer in LAYERS for part in layer}


def arrows(modules: dict[str, str]) -> set[tuple[str, str]]:
    """(importer, imported) between top-level parts of the package; a folder is one part."""
    found = set()
    for module, source in modules.items():
        for name in imported(module, source):
            first, _, rest = name.partition(".")
            if first == "flowsim":
                found.add((module.split(".")[0], rest.split(".")[0] or "flowsim"))
    return {(importer, target) for importer, target in found if importer != target}


def forbidden_arrows(modules: dict[str, str]) -> list[str]:
    """A sentence for each arrow that the tables above do not allow."""
    rank = {part: place for place, layer in enumerate(LAYERS) for part in layer}
    complaints = [f"{part} is in no layer; add it to LAYERS" for part in {m.split(".")[0] for m in modules} - set(rank)]
    for importer, target in sorted(arrows(modules)):
        if importer not in rank or target not in rank:
            continue
        if target not in ONLY.get(importer, {target}) or rank[target] > rank[importer]:
            complaints.append(f"{importer} -> {target}: {importer} must not import {target}")
    return complaints


def cycle(modules: dict[str, str]) -> list[str]:
    """A cycle of modules, files of a folder told apart; empty where there is none."""
    names = {f"flowsim.{module}": module for module in modules}
    edges = {
        module: {names[name] for name in imported(module, source) if name in names} - {module}
        for module, source in modules.items()
    }

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in ended:
            return []
        found = next(filter(None, (walk(target, [*path, module]) for target in sorted(edges[module]))), [])
        ended.add(module)
        return found

    ended: set[str] = set()
    return next(filter(None, (walk(module, []) for module in sorted(edges))), [])


def packages(modules: dict[str, str]) -> set[tuple[str, str]]:
    """(part, package) for every import of something that is not ours."""
    return {
        (module.split(".")[0], name.split(".")[0])
        for module, source in modules.items()
        for name in imported(module, source)
        if name.split(".")[0] != "flowsim"
    }


def test_every_import_points_from_a_higher_layer_to_a_lower_one():
    assert forbidden_arrows(sources()) == []


def test_no_module_imports_itself_by_way_of_others():
    assert " -> ".join(cycle(sources())) == ""


@pytest.mark.parametrize("package", KEPT_TO)
def test_a_package_is_imported_only_where_it_belongs(package):
    users = {part for part, name in packages(sources()) if name == package}
    assert users <= KEPT_TO[package], f"{package} is imported in {sorted(users - KEPT_TO[package])}"


def test_only_the_profilers_own_torch_modules_import_torch_and_none_of_them_is_imported_at_a_commands_start():
    users = {
        module for module, source in sources().items() if "torch" in {n.split(".")[0] for n in imported(module, source)}
    }
    assert users == {f"profiler.{name}" for name in PROFILER_TORCH}
    needing = {f"flowsim.{module}" for module in users}
    for module, source in sources().items():
        if module not in users:
            at_the_top = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
            assert needing.isdisjoint(node.module for node in at_the_top), module


def test_the_profiler_needs_few_packages():
    from sys import stdlib_module_names

    used = {name for part, name in packages(sources()) if part == "profiler"} - stdlib_module_names
    assert used <= PROFILER_PACKAGES


def test_no_module_is_a_drawer_for_odds_and_ends():
    names = {part for module in sources() for part in module.split(".")}
    assert not names & {"utils", "util", "helpers", "misc", "common"}


def test_every_module_can_be_read_in_one_sitting():
    lengths = {module: source.count("\n") for module, source in sources().items()}
    assert {module: lines for module, lines in lengths.items() if lines > MAX_LINES} == {}


@pytest.mark.parametrize(
    ("module", "line", "complaint"),
    [
        ("policy", "from flowsim.instance import Instance", "policy -> instance"),
        ("timeline", "import flowsim.core", "timeline -> core"),
        ("workload.synthetic", "def f():\n    from flowsim.policy import View", "workload -> policy"),
        ("report.plots", "from flowsim import sim", "report -> sim"),
        ("core", "from flowsim import simulate", "core -> flowsim"),
        ("newcomer", "", "newcomer is in no layer"),
    ],
)
def test_an_arrow_the_other_way_is_named(module, line, complaint):
    (found,) = forbidden_arrows({module: line})
    assert found.startswith(complaint)


def test_a_cycle_is_found_though_an_import_hides_in_a_function():
    modules = {"core": "from flowsim.kv import KVPool", "kv": "def f():\n    import flowsim.core"}
    assert cycle(modules) == ["core", "kv", "core"]
