"""The trace formats of the field: one function each, from a file to rows.

What a format's columns or keys are called, its time unit, its block size and its rules are here and nowhere else;
`docs/workloads.md` has them as a table. This module must not know sorting, rebasing, SLO rules or requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

from flowsim.workload.readers.cells import (
    REQUIRED,
    Field,
    hashes,
    integer,
    slo_class,
    time,
    tokens,
    tokens_or_none,
)
from flowsim.workload.readers.csv_table import read_csv
from flowsim.workload.readers.file import Item, TraceFile
from flowsim.workload.readers.json_table import read_objects
from flowsim.workload.readers.table import OPTIONAL, BadRow, ReadRows, Table, rows_of

__all__ = [
    "read_azure",
    "read_burstgpt",
    "read_lengths",
    "read_mooncake",
    "read_plain_csv",
    "read_plain_jsonl",
    "read_qwen",
]

PROMPT_KEYS = ("prompt_len", "input_len", "input_length", "prompt_tokens", "input_toks")
OUTPUT_KEYS = ("output_len", "output_length", "output_tokens", "output_toks")
ARRIVAL_KEYS = ("arrival_s", "arrival_time", "timestamp")

PLAIN = {
    "arrival": Field(time, ("arrival_s",), REQUIRED),
    "prompt_tokens": Field(tokens, ("prompt_tokens",), REQUIRED),
} | OPTIONAL


def read_plain_csv(file: TraceFile) -> ReadRows:
    """The project's own CSV: `requests.csv` of a run, or any file with `arrival_s` and `prompt_tokens`."""
    return rows_of(file, read_csv(file, PLAIN), "s")


def read_plain_jsonl(file: TraceFile) -> ReadRows:
    """The fields of the project's own CSV as JSON objects; the output may have the names that other tools give it."""
    return rows_of(file, read_objects(file, PLAIN | {"output_tokens": Field(tokens, OUTPUT_KEYS)}), "s")


# ---------------------------------------------------------------- Azure LLM inference traces, 2023 and 2024

_TIMESTAMP = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?: ?(Z|([+-])(\d\d):?(\d\d)))?", re.ASCII
)


def read_azure(file: TraceFile) -> ReadRows:
    """Azure/AzurePublicDataset, LLM inference 2023 (7-digit fractions) and 2024 (time zone offsets).

    Fractions are exact to the nanosecond. Either every row has a time zone or none has.
    """
    if file.time_unit:
        raise ValueError(f"{file.path}: TIMESTAMP is a date, which has no unit; leave time_unit={file.time_unit} out")
    fields = {
        "arrival": Field(_timestamps_ns(), ("TIMESTAMP",), REQUIRED),
        "prompt_tokens": Field(tokens, ("ContextTokens",), REQUIRED),
        "output_tokens": Field(tokens, ("GeneratedTokens",), REQUIRED),
    }
    read = rows_of(file, read_csv(file, fields), "ns")
    read.time_unit = "date"
    return read


def _timestamps_ns() -> Callable[[str], int]:
    """A reader of dates as nanoseconds since 1970; the first good one says whether there are time zones."""
    zoned: list[bool] = []

    def read(cell: str) -> int:
        found = _TIMESTAMP.fullmatch(cell.strip())
        if found is None:
            raise ValueError("it must be a date and time, as 2023-11-16 18:17:03.9799600 or with a zone +00:00")
        year, month, day, hour, minute, second = map(int, found.groups()[:6])
        fraction, zone, sign, zone_hour, zone_minute = found.groups()[6:]
        if hour > 23 or minute > 59 or second > 59 or int(zone_hour or 0) > 23 or int(zone_minute or 0) > 59:
            raise ValueError("hours are within 0..23, minutes and seconds within 0..59")
        if not 1970 <= year <= 2261:
            raise ValueError("the year must be within 1970..2261")
        days = date(year, month, day).toordinal() - date(1970, 1, 1).toordinal()
        minutes = (days * 24 + hour) * 60 + minute
        if zone and zone != "Z":
            offset = int(zone_hour) * 60 + int(zone_minute)
            minutes += -offset if sign == "+" else offset
        if not zoned:
            zoned.append(bool(zone))
        if zoned[0] != bool(zone):
            raise ValueError(
                "it must have a time zone as the rows before it" if zoned[0] else "no row before has a zone"
            )
        return (minutes * 60 + second) * 10**9 + int((fraction or "").ljust(9, "0"))

    return read


# ---------------------------------------------------------------- BurstGPT


def read_burstgpt(file: TraceFile) -> ReadRows:
    """HPMLL/BurstGPT, releases 1 and 2.

    Its README: `Response tokens` 0 marks a failed request; such rows are left out, as in the data set's own
    `without_fails` files, and counted.
    """
    fields = {
        "arrival": Field(time, ("Timestamp",), REQUIRED),
        "prompt_tokens": Field(tokens_or_none, ("Request tokens",), REQUIRED),
        "output_tokens": Field(tokens_or_none, ("Response tokens",), REQUIRED),
    }
    return _without_failed(file, read_csv(file, fields), "s", "Request tokens")


# ---------------------------------------------------------------- traces with hash ids: Mooncake, Qwen-Bailian


def read_mooncake(file: TraceFile) -> ReadRows:
    """kvcache-ai/Mooncake traces: milliseconds, hash ids of 512-token blocks."""
    fields = {
        "arrival": Field(time, ("timestamp",), REQUIRED),
        "prompt_tokens": Field(tokens, ("input_length",), REQUIRED),
        "output_tokens": Field(tokens, ("output_length",), REQUIRED),
        "prefix_hashes": Field(hashes, ("hash_ids",)),
    }
    read = rows_of(file, read_objects(file, fields), "ms")
    read.block_tokens = 512
    return read


QWEN_BLOCK_TOKENS = 16
ROOT = -1


def read_qwen(file: TraceFile) -> ReadRows:
    """alibaba-edu/qwen-bailian-usagetraces-anon: seconds, 16-token blocks, `type` as class, turns of chats.

    A follow-up turn is reduced to its new tokens, 16 for each block more than its parent's, at most `input_length`; its
    hash ids are those of these blocks. Where there is no block more, its last block is taken as new, and counted
    (`clamped_turns`). A turn whose parent is not in the file is whole, with a warning.
    """
    fields = {
        "arrival": Field(time, ("timestamp",), REQUIRED),
        "prompt_tokens": Field(tokens, ("input_length",), REQUIRED),
        "output_tokens": Field(tokens, ("output_length",), REQUIRED),
        "slo_class": Field(slo_class, ("type",), REQUIRED),
        "prefix_hashes": Field(hashes, ("hash_ids",), REQUIRED),
        "chat": Field(integer, ("chat_id",), REQUIRED),
        "parent": Field(integer, ("parent_chat_id",), REQUIRED),
    }
    table = read_objects(file, fields)
    warnings, clamped_turns = _keep_new_turns(table)
    read = rows_of(file, table, "s")
    read.block_tokens = QWEN_BLOCK_TOKENS
    read.warnings += warnings
    read.clamped_turns = clamped_turns
    return read


def _keep_new_turns(table: Table) -> tuple[list[str], int]:
    """Reduce the table's follow-up turns; answer warnings, and how many turns had no new block."""
    columns = table.columns
    chats, parents = columns.pop("chat"), columns.pop("parent")
    prompts, hash_ids = columns["prompt_tokens"], columns["prefix_hashes"]
    blocks = {chat: len(ids) for chat, ids in zip(reversed(chats), reversed(hash_ids), strict=True)}  # the first counts
    missing = clamped = 0
    for row, parent in enumerate(parents):
        if parent == ROOT:
            continue
        if parent not in blocks:
            missing += 1
            continue
        new = len(hash_ids[row]) - blocks[parent]
        if new <= 0:
            clamped += 1
            prompts[row] = (prompts[row] - 1) % QWEN_BLOCK_TOKENS + 1
            hash_ids[row] = hash_ids[row][-1:]
        else:
            prompts[row] = min(QWEN_BLOCK_TOKENS * new, prompts[row])
            hash_ids[row] = hash_ids[row][-new:]
    warnings = []
    if missing:
        warnings.append(
            f"{missing} follow-up turns whose parent_chat_id is not in the file: read whole, as first turns"
        )
    if len(blocks) < len(chats):
        warnings.append(f"{len(chats) - len(blocks)} rows repeat a chat_id; of each, the first is the parent")
    return warnings, clamped


# ---------------------------------------------------------------- vLLM and ShareGPT-style files with lengths


def read_lengths(file: TraceFile) -> ReadRows:
    """JSON objects with lengths, or the result of vLLM's serving benchmark, an object of lists."""
    keys = set(file.names)
    if len(file.items) == 1 and "input_lens" in keys:
        return _read_result(file, file.items[0].value)
    if not keys.intersection(PROMPT_KEYS) and keys & {"conversations", "prompt"}:
        raise ValueError(
            f"{file.path}: {file.items[0].where}: the requests have texts and no lengths; lengths in tokens are needed "
            f"(a tokenizer counts them): add one of {', '.join(PROMPT_KEYS)} and one of {', '.join(OUTPUT_KEYS)}"
        )
    in_ns = "arrival_time_ns" in keys
    fields: Mapping[str, Field] = OPTIONAL | {
        "arrival": Field(time, ("arrival_time_ns",) if in_ns else ARRIVAL_KEYS, REQUIRED),
        "prompt_tokens": Field(tokens, PROMPT_KEYS, REQUIRED),
        "output_tokens": Field(tokens, OUTPUT_KEYS),
    }
    return rows_of(file, read_objects(file, fields), "ns" if in_ns else "s")


def _read_result(file: TraceFile, result: Mapping[str, Any]) -> ReadRows:
    """A benchmark's lists as rows; it writes an output of 0 tokens for a failed request, which is left out."""
    fields = {
        "arrival": Field(time, ("start_times",), REQUIRED),
        "prompt_tokens": Field(tokens_or_none, ("input_lens",), REQUIRED),
        "output_tokens": Field(tokens_or_none, ("output_lens",)),
    }
    listed = result["input_lens"] if isinstance(result["input_lens"], list) else []
    lists = {key: result[key] for field in fields.values() for key in field.names if key in result}
    for key, values in lists.items():
        if not isinstance(values, list) or len(values) != len(listed):
            raise ValueError(f"{file.path}: the key {key} must be a list, as long as input_lens")
    rows = enumerate(zip(*lists.values(), strict=True))
    items = [Item(f"value [{row}]", dict(zip(lists, values, strict=True))) for row, values in rows]
    read = _without_failed(file, read_objects(file, fields, items), "s", "input_lens")
    read.ignored = tuple(key for key in result if key not in lists)
    return read


def _without_failed(file: TraceFile, table: Table, unit: str, prompt: str) -> ReadRows:
    """The answer for this table, requests without an output left out and counted.

    Only a failed request may be without a prompt, which the file calls `prompt`.
    """
    outputs = table.columns.get("output_tokens", [1] * len(table))
    good = [row for row, tokens_out in enumerate(outputs) if tokens_out]
    failed = len(table) - len(good)
    prompts = table.columns["prompt_tokens"]
    table.bad_rows += [
        BadRow(table.where(row), prompt, f"{prompt} is 0; it must be at least 1, for the request has an output")
        for row in good
        if not prompts[row]
    ]
    read = rows_of(file, table.take([row for row in good if prompts[row]]), unit)
    if failed:
        read.left_out["failed (an output of 0 tokens)"] = failed
    return read
