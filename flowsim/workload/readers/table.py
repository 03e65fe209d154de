"""What a reader gives back: checked rows, with a report of what was left out and why.

This module must not know any format's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from flowsim.workload.readers.cells import Field, seconds, slo, slo_class, tokens
from flowsim.workload.readers.cells import hashes as read_hashes
from flowsim.workload.readers.file import TraceFile
from flowsim.workload.rows import Rows

__all__ = ["NO_ARRIVAL", "OPTIONAL", "BadRow", "ReadRows", "Table", "resolve", "rows_of"]

NO_ARRIVAL = "no arrival"
SLOS = ("ttft_slo_s", "tbt_slo_s")

OPTIONAL = {  # what the project's own formats may say of a request beside its arrival and its prompt
    "output_tokens": Field(tokens, ("output_tokens",)),
    "slo_class": Field(slo_class, ("slo_class",)),
    "ttft_slo_s": Field(slo, ("ttft_slo_s",)),
    "tbt_slo_s": Field(slo, ("tbt_slo_s",)),
    "abandon_s": Field(slo, ("abandon_s",)),
    "prefix_hashes": Field(read_hashes, ("prefix_hashes",)),
}


class BadRow(NamedTuple):
    """A row that cannot be read: where it stands, the kind of fault for counting, and the fault in words."""

    where: str
    reason: str
    fault: str

    def __str__(self) -> str:
        return f"{self.where}: {self.fault}"


@dataclass(slots=True, kw_only=True)
class Table:
    """The good rows of a file in file order, as columns by field name; columns that the file lacks are left out.

    `places` says where each row stands; None is for a CSV without a bad row.
    """

    columns: dict[str, Any]
    ignored: tuple[str, ...]
    bad_rows: list[BadRow] = field(default_factory=list)
    places: list[str] | None = None

    def add(self, where: str, values: list[Any]) -> None:
        """A row at the end of a table of lists with `places`."""
        assert self.places is not None
        self.places.append(where)
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)

    def __len__(self) -> int:
        return len(self.columns["prompt_tokens"])

    def where(self, row: int) -> str:
        """Where the row stands, as errors say it."""
        return f"line {row + 2}" if self.places is None else self.places[row]

    def take(self, rows: list[int]) -> Table:
        """These rows only."""
        if len(rows) == len(self):
            return self
        return Table(
            columns={name: [values[row] for row in rows] for name, values in self.columns.items()},
            ignored=self.ignored,
            bad_rows=self.bad_rows,
            places=[self.where(row) for row in rows],
        )


@dataclass(slots=True, kw_only=True)
class ReadRows:
    """What a reader answers: rows in file order, arrivals in seconds after the earliest, and a report.

    A row without an arrival (there are some only if the file `draws_arrivals`) has NaN, and then the other arrivals
    have no meaning. `left_out` counts rows that the format's own rule leaves out, by reason; `bad_rows` are those that
    could not be read.
    """

    rows: Rows
    time_unit: str
    ignored: tuple[str, ...]
    bad_rows: list[BadRow]
    has_slos: bool = False
    block_tokens: int | None = None
    clamped_turns: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def resolve(file: TraceFile, fields: Mapping[str, Field], found: tuple[str, ...], where: str) -> dict[str, str]:
    """Which column or key of the file each field is read from.

    Raises:
        ValueError: a field has two of its names in the file.
    """
    chosen = {}
    for name, wanted in fields.items():
        there = [alias for alias in wanted.names if alias in found]
        if len(there) > 1:
            raise ValueError(f"{file.path}: {where}{' and '.join(there)} say the same thing; keep one of them")
        if there:
            chosen[name] = there[0]
    return chosen


def rows_of(file: TraceFile, table: Table, unit: str) -> ReadRows:
    """The answer of a reader whose table has the columns of `Rows`, with `arrival` in `unit` instead of `arrival_s`.

    `file.time_unit` overrides `unit`. A file without a column of arrivals has NaN for each.
    """
    columns = dict(table.columns)
    unit = file.time_unit or unit
    prompt_tokens = np.asarray(columns.pop("prompt_tokens"), dtype=np.int64)
    arrival_s = seconds(columns.pop("arrival", np.full(len(prompt_tokens), np.nan)), unit)
    has_slos = any(name in columns for name in SLOS)
    hashes = columns.pop("prefix_hashes", None)
    for name, kind in {"output_tokens": np.int64, "ttft_slo_s": float, "tbt_slo_s": float, "abandon_s": float}.items():
        if name in columns:
            columns[name] = np.asarray(columns[name], dtype=kind)
    if hashes is not None and any(hashes):
        columns["prefix_hashes"] = hashes
    return ReadRows(
        rows=Rows.of(arrival_s, prompt_tokens, **columns),
        time_unit=unit,
        ignored=table.ignored,
        bad_rows=table.bad_rows,
        has_slos=has_slos,
    )
