"""Plain CSV: from a file to checked columns, every bad row named by its line.

Two readers with one meaning. The fast one (pandas splits, and each different cell is read once) takes only
files in which every row has the header's number of fields, nothing is quoted and every cell is good. Whatever
else there is, the careful one reads the file again, row by row, and says what is wrong. pandas' own numbers
are not used: it takes `True` for a whole number, and not every version reads floats exactly. This module must
not know sorting, rebasing or requests.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_TOKENS", "Columns", "read_plain_csv"]

MAX_TOKENS = 2**31 - 1
REQUIRED = ("arrival_s", "prompt_tokens")

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_INFINITY = re.compile(r"\+?inf(inity)?", re.IGNORECASE)


@dataclass(slots=True, kw_only=True)
class Columns:
    """The good rows of a file in file order, and one sentence for each bad one ("line 3: ...").

    Seconds are float64 and tokens int64; a missing SLO is `inf`, a missing class `default`, and without a
    column of output tokens each is 1. `ignored` names the columns that were not read, in the file's order.
    """

    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    ttft_slo_s: NDArray[np.float64]
    tbt_slo_s: NDArray[np.float64]
    abandon_s: NDArray[np.float64]
    slo_class: list[str]
    ignored: tuple[str, ...]
    bad_rows: list[str] = field(default_factory=list)


def read_plain_csv(path: Path) -> Columns:
    """Read a CSV file, or a gzip of one: UTF-8, a header line, commas, any line ends.

    Raises:
        ValueError: the file cannot be read or decoded, is empty, lacks or repeats a column, or its quoting
            is broken, naming the file and where it can the line. Bad rows are not errors here.
    """
    text = _text(path)
    first, _, body = text.partition("\n")
    header = _header(path, first)
    body = body.rstrip("\n")
    if not body:
        raise ValueError(f"{path}: there is a header but no row; a trace needs at least one request")
    return _read_fast(body, header) or _read_carefully(path, body, header)


def _text(path: Path) -> str:
    """The decoded file with every line end a newline, and without a byte-order mark."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    if data.startswith(b"\x1f\x8b") or (data and path.suffix == ".gz"):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: is no complete gzip file: {error}") from error
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}: line {line} is not UTF-8 text; save the file as UTF-8") from error
    if not text.strip():
        raise ValueError(f"{path}: the file is empty; a trace needs a header and at least one row")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _header(path: Path, line: str) -> list[str]:
    try:
        header = [name.strip() for name in next(csv.reader([line], strict=True), [])]
    except csv.Error as error:
        raise ValueError(f"{path}: line 1, the header, cannot be read: {error}") from error
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        raise ValueError(f"{path}: line 1: the column {twice[0]!r} is there twice; names must differ")
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        raise ValueError(
            f"{path}: line 1: no column {' and no column '.join(missing)}; "
            f"found {', '.join(header) or 'none'}. "
            "A trace needs the comma-separated columns arrival_s and prompt_tokens, and reads output_tokens, "
            "slo_class, ttft_slo_s, tbt_slo_s and abandon_s where they are there"
        )
    return header


# ---------------------------------------------------------------- cells


def _number(text: str) -> float:
    """The finite or overflowing number that `text` writes in ASCII digits, NaN for anything else."""
    text = text.strip()
    return float(text) if _NUMBER.fullmatch(text) else math.nan


def _arrival(text: str) -> float:
    value = _number(text)
    if not 0.0 <= value < math.inf:
        raise ValueError("it must be a finite number of seconds >= 0")
    return value


def _tokens(text: str) -> int:
    value = _number(text)
    if not (1 <= value <= MAX_TOKENS and value.is_integer()):
        raise ValueError(f"it must be a whole number of tokens within 1..{MAX_TOKENS}")
    return int(value)


def _slo(text: str) -> float:
    text = text.strip()
    value = math.inf if not text or _INFINITY.fullmatch(text) else _number(text)
    if not value > 0.0:
        raise ValueError("it must be a number of seconds > 0 (empty or inf for none)")
    return value


def _slo_class(text: str) -> str:
    return text.strip() or "default"


_CELLS: dict[str, tuple[Callable[[str], Any], Any]] = {  # how a cell is read, and what stands for no column
    "arrival_s": (_arrival, None),
    "prompt_tokens": (_tokens, None),
    "output_tokens": (_tokens, 1),
    "ttft_slo_s": (_slo, math.inf),
    "tbt_slo_s": (_slo, math.inf),
    "abandon_s": (_slo, math.inf),
    "slo_class": (_slo_class, "default"),
}


def _columns(header: list[str], cells: dict[str, Any], rows: int, bad_rows: list[str]) -> Columns:
    full = {name: cells.get(name, [default] * rows) for name, (_, default) in _CELLS.items()}
    return Columns(
        arrival_s=np.asarray(full["arrival_s"], dtype=np.float64),
        prompt_tokens=np.asarray(full["prompt_tokens"], dtype=np.int64),
        output_tokens=np.asarray(full["output_tokens"], dtype=np.int64),
        ttft_slo_s=np.asarray(full["ttft_slo_s"], dtype=np.float64),
        tbt_slo_s=np.asarray(full["tbt_slo_s"], dtype=np.float64),
        abandon_s=np.asarray(full["abandon_s"], dtype=np.float64),
        slo_class=full["slo_class"],
        ignored=tuple(name for name in header if name not in _CELLS),
        bad_rows=bad_rows,
    )


# ---------------------------------------------------------------- the two readers


def _read_fast(body: str, header: list[str]) -> Columns | None:
    """The columns of a file without a fault, or None."""
    import pandas as pd

    data = body.encode("utf-8")
    if b'"' in data or b"\0" in data or not _is_rectangular(data, len(header)):
        return None
    wanted = [name for name in header if name in _CELLS]
    try:
        frame = pd.read_csv(
            io.BytesIO(data),
            header=None,
            names=header,
            index_col=False,
            usecols=wanted,
            dtype="str",
            na_filter=False,
            low_memory=False,
        )
        cells = {name: _fast_cells(frame[name], name) for name in wanted}
    except ValueError:
        return None
    return _columns(header, cells, len(frame), [])


def _is_rectangular(data: bytes, fields: int) -> bool:
    """Whether every line has the commas of `fields` unquoted fields."""
    characters = np.frombuffer(data, dtype=np.uint8)
    line_ends = np.append(np.flatnonzero(characters == ord("\n")), len(data))
    commas = np.flatnonzero(characters == ord(","))
    in_line = np.diff(np.searchsorted(commas, line_ends), prepend=0)
    return bool((in_line == fields - 1).all())


def _fast_cells(column: Any, name: str) -> Any:
    """The column's values; any that is not good is a ValueError. Each different text is read once."""
    if name == "arrival_s":
        return _fast_arrivals(column.tolist())
    codes, texts = column.factorize()
    values = [_CELLS[name][0](text) for text in texts.tolist()]
    return [values[code] for code in codes.tolist()] if name == "slo_class" else np.array(values)[codes]


def _fast_arrivals(texts: list[str]) -> NDArray[np.float64]:
    """As `_arrival`, for texts that hardly repeat; `float` also takes `_` and digits of other scripts."""
    together = "".join(texts)
    values = np.array(list(map(float, texts)))
    if "_" in together or not together.isascii() or not ((values >= 0.0) & (values < math.inf)).all():
        raise ValueError("arrival_s")
    return values


def _read_carefully(path: Path, body: str, header: list[str]) -> Columns:
    """Every row, cell by cell; the header is line 1, and a row has the number of its first line."""
    plan = [(index, name, _CELLS[name][0]) for index, name in enumerate(header) if name in _CELLS]
    rows: list[list[Any]] = []
    bad_rows: list[str] = []
    reader = csv.reader(io.StringIO(body, newline=""), strict=True)
    line = 2
    try:
        for cells in reader:
            fault = _row_fault(cells, len(header)) or _read_row(cells, plan, rows)
            if fault:
                bad_rows.append(f"line {line}: {fault}")
            line = reader.line_num + 2
    except csv.Error as error:
        raise ValueError(f"{path}: line {line}: the quoting is broken: {error}") from error
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(plan)
    cells_by_name = {name: list(values) for (_, name, _), values in zip(plan, columns, strict=True)}
    return _columns(header, cells_by_name, len(rows), bad_rows)


def _row_fault(cells: list[str], fields: int) -> str:
    if not cells:
        return "the line is blank; every line between the first row and the last must hold one"
    if len(cells) != fields:
        return f"it has {len(cells)} fields; the header has {fields}"
    return ""


def _read_row(cells: list[str], plan: list[tuple[int, str, Callable[[str], Any]]], rows: list[list[Any]]) -> str:
    """Append the row's values to `rows`, or answer what is wrong with the first bad cell."""
    cell = name = ""
    values = []
    try:
        for index, name, read in plan:  # noqa: B007 -- the handler names them
            cell = cells[index]
            values.append(read(cell))
    except ValueError as error:
        found = repr(cell[:40]) if cell.strip() else "empty"
        return f"{name} is {found}; {error}"
    rows.append(values)
    return ""
