"""Readers of trace files, one function a format; `READERS` is the one list of them.

To add a format: write its function (`formats.py` has examples), and add its entry here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flowsim.workload.readers.cells import UNITS_PER_S
from flowsim.workload.readers.file import TraceFile, open_trace
from flowsim.workload.readers.formats import (
    PROMPT_KEYS,
    read_azure,
    read_burstgpt,
    read_lengths,
    read_mooncake,
    read_plain_csv,
    read_plain_jsonl,
    read_qwen,
)
from flowsim.workload.readers.table import NO_ARRIVAL, BadRow, ReadRows

__all__ = ["NO_ARRIVAL", "READERS", "TIME_UNITS", "BadRow", "Format", "ReadRows", "TraceFile", "choose", "open_trace"]

TIME_UNITS = tuple(UNITS_PER_S)
DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format: its reader, and how it is recognised.

    A file is of it if its layout is this one and its names hold all names of one of the sets. Arrivals that span more
    than `max_span_s` seconds are taken for a wrong unit.
    """

    read: Callable[[TraceFile], ReadRows]
    layout: str
    recognised_by: tuple[tuple[str, ...], ...]
    max_span_s: float = 30 * DAY_S

    def fits(self, file: TraceFile) -> bool:
        return file.layout == self.layout and any(set(names) <= set(file.names) for names in self.recognised_by)


# The first that fits is taken.
READERS = {
    "csv": Format(read=read_plain_csv, layout="csv", recognised_by=(("arrival_s",), ("prompt_tokens",))),
    "jsonl": Format(read=read_plain_jsonl, layout="json", recognised_by=(("arrival_s", "prompt_tokens"),)),
    "azure": Format(read=read_azure, layout="csv", recognised_by=(("TIMESTAMP", "ContextTokens", "GeneratedTokens"),)),
    "burstgpt": Format(
        read=read_burstgpt,
        layout="csv",
        recognised_by=(("Timestamp", "Request tokens", "Response tokens"),),
        max_span_s=366 * DAY_S,  # the published files span 61, 60 and 110 days
    ),
    "qwen": Format(
        read=read_qwen, layout="json", recognised_by=(("chat_id", "parent_chat_id", "timestamp", "input_length"),)
    ),
    "mooncake": Format(
        read=read_mooncake, layout="json", recognised_by=(("timestamp", "input_length", "output_length"),)
    ),
    "vllm": Format(
        read=read_lengths,
        layout="json",
        recognised_by=(("input_lens",), *((key,) for key in PROMPT_KEYS), ("conversations",), ("prompt",)),
    ),
}


def choose(file: TraceFile, name: str) -> str:
    """The name of the file's format: `name`, or for `auto` the first of `READERS` that fits.

    Raises:
        ValueError: no such format; or none fits, saying what was found and what was looked for.
    """
    if name in READERS:
        return name
    if name != "auto":
        raise ValueError(f"format is {name!r}; it must be auto or one of {', '.join(READERS)}")
    if file.layout == "json" and not file.items:
        raise ValueError(f"{file.path}: the list is empty; a trace needs at least one request")
    fitting = next((known for known, entry in READERS.items() if entry.fits(file)), None)
    if fitting is None:
        raise ValueError(_not_recognised(file))
    return fitting


def _not_recognised(file: TraceFile) -> str:
    what, where, fault = "columns", "line 1", ""
    if file.layout == "json":
        what, where = "keys", file.items[0].where
        fault = next((f" ({item.where}: {item.fault})" for item in file.items if item.fault), "")
    looked_for = "; ".join(
        f"{name}: {' or '.join(' + '.join(names) for names in entry.recognised_by)}"
        for name, entry in READERS.items()
        if entry.layout == file.layout
    )
    return (
        f"{file.path}: {where}: no trace format has these {what}: {', '.join(file.names)[:200] or 'none'}{fault}. "
        f"Looked for {looked_for}. Rename the {what}, or name the format with format="
    )
