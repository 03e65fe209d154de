"""CSV: from a file's text to checked columns, every bad row named by its line.

Two readers with one meaning. The fast one (split at every comma, and each different cell is read once) takes only
files in which every row has the header's number of fields, nothing is quoted and every cell is good. Whatever
else there is, the careful one reads the file again, row by row, and says what is wrong. This module must not know any
format's names.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowsim.workload.readers.cells import REQUIRED, Field, time
from flowsim.workload.readers.file import TraceFile
from flowsim.workload.readers.table import NO_ARRIVAL, BadRow, Table, resolve

__all__ = ["read_csv"]

CHUNK_CHARACTERS = 2**24

Plan = dict[str, tuple[str, Field]]  # column of the file -> the field that is read from it


def read_csv(file: TraceFile, fields: Mapping[str, Field]) -> Table:
    """The columns of a CSV file: a header line, commas, quotes where needed.

    Raises:
        ValueError: there is no row, a column is missing or there twice, or the quoting is broken, naming the
            file and where it can the line. Bad rows are not errors here.
    """
    plan = _plan(file, fields)
    body = file.text.partition("\n")[2].rstrip("\n")
    if not body:
        raise ValueError(f"{file.path}: there is a header but no row; a trace needs at least one request")
    ignored = tuple(name for name in file.header if name not in plan)
    if not file.draws_arrivals:  # which allows empty cells
        columns = _read_fast(body, file.header, plan)
        if columns is not None:
            return Table(columns=columns, ignored=ignored)
    return _read_carefully(file, body, plan, ignored)


def _plan(file: TraceFile, fields: Mapping[str, Field]) -> Plan:
    header = file.header
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        raise ValueError(f"{file.path}: line 1: the column {twice[0]!r} is there twice; names must differ")
    chosen = resolve(file, fields, tuple(header), "line 1: the columns ")
    missing = [
        " or ".join(field.names)
        for name, field in fields.items()
        if field.default is REQUIRED and name not in chosen and not (name == "arrival" and file.draws_arrivals)
    ]
    if missing:
        drawn = "arrival" in fields and "arrival" not in chosen
        raise ValueError(
            f"{file.path}: line 1: no column {' and no column '.join(missing)}; "
            f"found {', '.join(header) or 'none'}. This format reads the comma-separated columns "
            f"{', '.join(name for field in fields.values() for name in field.names)}"
            + ("; synthesize=poisson with rate_rps draws arrivals for a file that has none" if drawn else "")
        )
    return {column: (name, fields[name]) for name, column in chosen.items()}


def _read_fast(body: str, header: list[str], plan: Plan) -> dict[str, Any] | None:
    """The columns of a file without a fault, or None."""
    if '"' in body or not _is_rectangular(body, len(header)):
        return None
    texts: dict[str, list[str]] = {column: [] for column in plan}
    for chunk in _chunks(body):
        cells = chunk.replace("\n", ",").split(",")
        for column, values in texts.items():
            values += cells[header.index(column) :: len(header)]
    try:
        return {name: _fast_cells(texts.pop(column), field) for column, (name, field) in plan.items()}
    except ValueError:
        return None


def _is_rectangular(body: str, fields: int) -> bool:
    """Whether every line has the commas of `fields` unquoted fields."""
    characters = np.frombuffer(body.encode("utf-8") + b"\n", dtype=np.uint8)
    is_line_end = characters == ord("\n")
    separators = is_line_end[is_line_end | (characters == ord(","))]
    if len(separators) % fields:
        return False
    rows = separators.reshape(-1, fields)
    return bool(rows[:, -1].all() and not rows[:, :-1].any())


def _chunks(body: str) -> Iterator[str]:
    """The body in pieces of whole lines, their last line end cut: so columns that are not read cost no memory."""
    start = 0
    while start <= len(body):
        end = body.find("\n", start + CHUNK_CHARACTERS)
        end = len(body) if end < 0 else end
        yield body[start:end]
        start = end + 1


def _fast_cells(texts: list[str], field: Field) -> Any:
    """The column's values; any that is not good is a ValueError. Each different text is read once."""
    if field.read is time:
        return _fast_times(texts)
    values = {text: field.read(text) for text in dict.fromkeys(texts)}
    return list(map(values.__getitem__, texts))


def _fast_times(texts: list[str]) -> NDArray[Any]:
    """As `time`, for texts that hardly repeat; `float` and `int` also take `_` and digits of other scripts."""
    together = "".join(texts)
    if "_" in together or not together.isascii():
        raise ValueError("time")
    if together.isdigit():
        whole = np.array(list(map(int, texts)))
        if whole.dtype != np.int64:
            raise ValueError("time")
        return whole
    values = np.array(list(map(float, texts)))
    if not ((values >= 0.0) & (values < math.inf)).all():
        raise ValueError("time")
    return values


def _read_carefully(file: TraceFile, body: str, plan: Plan, ignored: tuple[str, ...]) -> Table:
    """Every row, cell by cell; the header is line 1, and a row has the number of its first line."""
    places = [(file.header.index(column), column, name, field) for column, (name, field) in plan.items()]
    table = Table(columns={name: [] for _, _, name, _ in places}, ignored=ignored, places=[])
    reader = csv.reader(io.StringIO(body, newline=""), strict=True)
    line = 2
    try:
        for cells in reader:
            where = f"line {line}"
            values = _row_fault(cells, len(file.header), where) or _read_row(cells, places, where, file.draws_arrivals)
            if isinstance(values, BadRow):
                table.bad_rows.append(values)
            else:
                table.add(where, values)
            line = reader.line_num + 2
    except csv.Error as error:
        raise ValueError(f"{file.path}: line {line}: the quoting is broken: {error}") from error
    return table


def _row_fault(cells: list[str], fields: int, where: str) -> BadRow | None:
    if not cells:
        fault = "the line is blank; every line between the first row and the last must hold one"
        return BadRow(where, "blank line", fault)
    if len(cells) != fields:
        return BadRow(where, "number of fields", f"it has {len(cells)} fields; the header has {fields}")
    return None


def _read_row(
    cells: list[str], places: list[tuple[int, str, str, Field]], where: str, draws_arrivals: bool
) -> list[Any] | BadRow:
    """The row's values, or what is wrong with the first bad cell."""
    values = []
    for index, column, name, field in places:
        cell = cells[index]
        if name == "arrival" and draws_arrivals and not cell.strip():
            values.append(math.nan)
            continue
        try:
            values.append(field.read(cell))
        except ValueError as error:
            empty = not cell.strip()
            reason = NO_ARRIVAL if empty and name == "arrival" else column
            return BadRow(where, reason, f"{column} is {'empty' if empty else repr(cell[:40])}; {error}")
    return values
