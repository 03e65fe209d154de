"""Markdown of `docs/beyond.md`: tables and wrapped paragraphs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

__all__ = ["table_of", "words", "wrapped"]


def words(items: Iterable[object]) -> str:
    """`a, b and c`."""
    texts = [str(item) for item in items]
    return ", ".join(texts[:-1]) + (" and " if len(texts) > 1 else "") + texts[-1]


def wrapped(section: str) -> str:
    """A section with its paragraphs and list items in lines of up to 118 letters; tables and code as they are."""
    blocks = section.strip().split("\n\n")
    return "\n\n".join(block if block.startswith(("#", "|", "!", "```")) else _lines(block) for block in blocks)


def _lines(block: str) -> str:
    items = re.split(r"\n(?=- )", block)
    return "\n".join(
        textwrap.fill(" ".join(item.split()), 118, subsequent_indent="  " if item.startswith("- ") else "",
                      break_long_words=False, break_on_hyphens=False)
        for item in items
    )  # fmt: skip


def table_of(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with its heads."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)
