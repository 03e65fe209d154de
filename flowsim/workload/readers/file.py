"""A trace file before it has a meaning: its decoded text, its JSON items, its column or key names.

This module must not know any format's names, nor what a request is.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import zlib
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Item", "TraceFile", "open_trace", "shown"]

SAMPLED_ITEMS = 10


class Item(NamedTuple):
    """One JSON value of a file: where it stands, what it is, and if it is no object, what is wrong."""

    where: str
    value: dict[str, Any]
    fault: str = ""


@dataclass(frozen=True)
class TraceFile:
    r"""A trace file's content, line ends all `\n`, without a byte-order mark, and how it is to be read.

    `time_unit` overrides the format's own where it is not None. With `draws_arrivals` the arrivals will be drawn, and
    rows may lack one.
    """

    path: Path
    text: str
    time_unit: str | None = None
    draws_arrivals: bool = False

    @cached_property
    def layout(self) -> str:
        """`json` for a JSON document or lines of JSON, else `csv`."""
        return "json" if self.text.lstrip()[0] in "[{" else "csv"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The columns of a CSV file, or the keys of the first JSON objects."""
        if self.layout == "csv":
            return tuple(self.header)
        return tuple(dict.fromkeys(key for item in self.items[:SAMPLED_ITEMS] for key in item.value))

    @cached_property
    def header(self) -> list[str]:
        """The cells of the first line, blanks around them cut."""
        try:
            return [name.strip() for name in next(csv.reader([self.text.partition("\n")[0]], strict=True), [])]
        except csv.Error as error:
            raise ValueError(f"{self.path}: line 1, the header, cannot be read: {error}") from error

    @cached_property
    def items(self) -> list[Item]:
        """The objects of a JSON list ("item [0]", ...), of lines of JSON ("line 1", ...), or the one of the file."""
        if self.text.lstrip().startswith("["):
            return [_item(f"item [{index}]", value) for index, value in enumerate(self._document())]
        lines = [_parsed(f"line {number}", line) for number, line in enumerate(self._lines(), start=1)]
        if lines[0].fault and len(lines) > 1:
            try:
                return [_item("the file", _decode(self.text))]
            except (ValueError, RecursionError):
                pass  # no document over several lines: lines, the first of which is bad
        return lines

    def _document(self) -> Any:
        try:
            return _decode(self.text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path}: the file is no JSON: {error or 'it is nested too deeply'}") from error

    def _lines(self) -> list[str]:
        return self.text.rstrip("\n \t").split("\n")


def open_trace(path: Path, *, time_unit: str | None = None, draws_arrivals: bool = False) -> TraceFile:
    """Read a text file, or a gzip of one.

    Raises:
        ValueError: the file cannot be read or decoded, or is empty, naming it.
    """
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if data.startswith(b"\x1f\x8b") or (data and path.suffix == ".gz"):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: is no complete gzip file: {error}") from error
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}: line {line} is not UTF-8 text; save the file as UTF-8") from error
    if not text.strip():
        raise ValueError(f"{path}: the file is empty; a trace needs at least one request")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return TraceFile(path, text, time_unit, draws_arrivals)


def _parsed(where: str, line: str) -> Item:
    if not line.strip():
        return Item(where, {}, "the line is blank; every line between the first row and the last must hold one")
    try:
        return _item(where, _decode(line))
    except (ValueError, RecursionError) as error:
        return Item(where, {}, f"it is {shown(line)}, no JSON: {error or 'it is nested too deeply'}")


def _item(where: str, value: Any) -> Item:
    if isinstance(value, dict):
        return Item(where, value)
    return Item(where, {}, f"it is {shown(value)}; it must be a JSON object")


def shown(value: Any) -> str:
    """A JSON value as errors quote it."""
    if isinstance(value, str):
        return repr(value[:40])
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return json.dumps(value)[:40]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} is there twice")
    return value


_decode = json.JSONDecoder(object_pairs_hook=_object).decode
