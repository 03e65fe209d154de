"""Markdown of `docs/beyond.md`: tables, wrapped paragraphs, and its last sections, which no table backs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

__all__ = ["CLOSING", "table_of", "words", "wrapped"]

CLOSING = """
## What was tried and does not help

- Planning with longer times than predicted (10 %, 25 %), a margin before each deadline (10, 25 ms), or serving the
  shortest of the set first instead of the earliest deadline: within 1 % of the feasible set without them.
- Larger or smaller joint batches than 2048 tokens (1024, 4096): 2 % and 5 % worse.
- Asking the policy at every layer and keeping a prefill running until the last moment the others allow: no better than
  letting it run to its end where they can wait for that, at many times the decisions.
- Slack as a share of the SLO, and second deadlines for late requests: below FlowPrefill, above. Medha's rule
  (`policy=least_remaining_slack`, [policies.md](policies.md)) has late requests first and not last, as *slack
  fraction* in the tables has them, and passes of 100 ms: on `mixed` a goodput of 5.7 req/s, where S-EDF in the same
  passes has 10.0, slack fraction 7.1 and FlowPrefill 12.1. In a backlog what is late comes first, and makes the next
  late. (`python -m flowsim task=goodput workload.num_requests=1000 task.precision=0.015 'task.grid={policy:
  [least_remaining_slack, chunked_adaptive, slack_fraction, flowprefill]}'`)

The first three were tried while the policy was made (2000 requests, seeds 0 and 1), the first two before what has
started went on, and are not in the tables.

## What is not here

- Prefills that have started do not move between instances, as their KV would have to; those that wait do.
  The bound of several instances lets all of them.
"""


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
