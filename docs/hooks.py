"""What mkdocs does besides turning docs/*.md into pages: the navigation, and the pages that are made from elsewhere.

README, CONTRIBUTING and CHANGELOG are pages too; the configurations of policies and the API reference are generated.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
POLICIES = "policies.md"  # the configurations are shown at its end
ELSEWHERE = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}

# A page that is in no section goes to the last one; one that does not exist is left out.
SECTIONS = {
    "Start": ["index.md", "quickstart.md", "concepts.md", "troubleshooting.md"],
    "Use": [
        "policies.md",
        "workloads.md",
        "serving.md",
        "results.md",
        "report.md",
        "figures.md",
        "studies.md",
        "regress.md",
    ],
    "Many machines": ["clusters.md", "slurm.md", "ray.md"],
    "Hardware": ["profiles.md", "profiler.md"],
    "Evidence": ["validation.md", "reproduction.md", "beyond.md", "performance.md", "invariants.md"],
    "Extend": ["contributing.md", "design.md", "changelog.md"],
}
MORE = "More"
API = {
    "Run": ["flowsim.sim", "flowsim.config", "flowsim.metrics", "flowsim.load"],
    "Requests and workloads": ["flowsim.core", "flowsim.workload"],
    "Policies": ["flowsim.policy", "flowsim.batching", "flowsim.feasible", "flowsim.rivals", "flowsim.layered",
                 "flowsim.granularity", "flowsim.queue", "flowsim.view", "flowsim.timeline"],
    "Hardware": ["flowsim.profile", "flowsim.latency", "flowsim.predictor"],
    "Clusters": ["flowsim.pool", "flowsim.router"],
    "Studies": ["flowsim.study", "flowsim.bound"],
    "Figures and reports": ["flowsim.report.plots", "flowsim.report.style", "flowsim.report"],
    "Tests": ["flowsim.testing", "flowsim.check"],
}  # fmt: skip
WHOLE = {"flowsim.workload", "flowsim.study", "flowsim.report", "flowsim.report.plots"}  # what they take from elsewhere


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages, and makes the navigation of all that there are."""
    for page, source in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_relinked(text)))
    reference = []
    for title, modules in API.items():
        page = f"api/{re.sub(r'[^a-z]+', '-', title.lower())}.md"
        files.append(File.generated(config, page, content=_reference(title, modules)))
        reference.append({title: page})
    config.nav = [*navigation([file.src_uri for file in files.documentation_pages()]), {"API reference": reference}]
    return files


def on_page_markdown(markdown: str, page: Page, **_more: object) -> str:
    """Adds the configurations to the page on policies; words for links that lead out of the site."""
    if page.file.src_uri == POLICIES:
        markdown += configurations()
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2`)", markdown)


def navigation(pages: list[str]) -> list[dict[str, list[str]]]:
    """The sections with the pages that exist; what is in no section is in the last."""
    written = [page for page in pages if not page.startswith("api/")]
    named = {page for section in SECTIONS.values() for page in section}
    sections = {title: [page for page in section if page in written] for title, section in SECTIONS.items()}
    sections[MORE] = sorted(set(written) - named)
    return [{title: found} for title, found in sections.items() if found]


def configurations() -> str:
    """Every shipped policy: what its parts do, in their own words, and its file."""
    parts = ["\n\n## Every shipped policy\n\nFrom the files of `conf/policy` and the docstrings of what they name.\n"]
    for path in sorted((ROOT / "conf" / "policy").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        parts.append(f"### {path.stem}\n\n{_rules(yaml.safe_load(text))}\n\n```yaml\n{text.strip()}\n```\n")
    return "\n".join(parts)


def _rules(node: dict[str, Any]) -> str:
    """A line for each part that a configuration names."""
    lines = []
    for key in ("_target_", "order", "batching"):
        given = node.get(key)
        thing = _named(given["_target_"] if isinstance(given, dict) else given, key)
        if thing is not None and key != "_target_":
            lines.append(f"- **{key}** `{thing.__name__}`: {_first(thing)}")
        elif thing is not None and thing.__name__ != "ComposedPolicy":
            lines.append(f"- **{thing.__name__}**: {_first(thing)}")
    return "\n".join(lines)


def _named(given: str | None, key: str) -> Any:
    from flowsim.policy import ORDERS

    if not isinstance(given, str):
        return None
    if key == "order" and given in ORDERS:
        order = ORDERS[given]
        return order if hasattr(order, "__name__") else type(order)
    module, _, name = given.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _first(thing: Any) -> str:
    """The first paragraph of a docstring."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def _reference(title: str, modules: list[str]) -> str:
    parts = [f"# {title}\n"]
    for name in modules:
        if importlib.util.find_spec(name) is None:
            continue
        parts.append(f"::: {name}\n")
        if name in WHOLE:
            names = "\n".join(f"        - {one}" for one in importlib.import_module(name).__all__)
            parts[-1] += f"    options:\n      members:\n{names}\n"
    return "\n".join(parts)


def _relinked(text: str) -> str:
    """Links of a file beside docs/ as they are on the site."""
    text = re.sub(r"\]\(docs/", "](", text)
    for page, source in ELSEWHERE.items():
        text = text.replace(f"]({source}", f"]({page}")
    return text
