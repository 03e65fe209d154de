"""JSON objects, one a request: from a file's items to checked columns, every bad one named by line or index.

This module must not know any format's names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flowsim.workload.readers.cells import REQUIRED, Field
from flowsim.workload.readers.file import Item, TraceFile, shown
from flowsim.workload.readers.table import NO_ARRIVAL, BadRow, Table, resolve

__all__ = ["read_objects"]

Plan = list[tuple[str, str, Field]]  # field, key, how it is read


def read_objects(file: TraceFile, fields: Mapping[str, Field], items: list[Item] | None = None) -> Table:
    """The columns of a file of JSON objects: a JSON list, or one object a line; or of these `items` of it.

    A key that some objects have, all must have: one that lacks it is a bad row, for a mistyped key is not a default.

    Raises:
        ValueError: there is no object, no object has a required key, or two keys say the same thing. Bad rows
            are not errors here.
    """
    items = file.items if items is None else items
    if not items:
        raise ValueError(f"{file.path}: the list is empty; a trace needs at least one request")
    found: dict[str, None] = {}
    for item in items:
        if not item.value.keys() <= found.keys():
            found.update(dict.fromkeys(item.value))
    chosen = resolve(file, fields, tuple(found), "the keys ")
    _check_required(file, fields, chosen, found)
    plan = _plan(file, fields, chosen)
    ignored = tuple(key for key in found if key not in chosen.values())
    table = Table(columns={name: [] for name, _, _ in plan}, ignored=ignored, places=[])
    for item in items:
        values = _read_item(item, plan, file.draws_arrivals)
        if isinstance(values, BadRow):
            table.bad_rows.append(values)
        else:
            table.add(item.where, values)
    return table


def _check_required(file: TraceFile, fields: Mapping[str, Field], chosen: Mapping[str, str], found: Any) -> None:
    for name, field in fields.items():
        if field.default is not REQUIRED or name in chosen or name == "arrival":
            continue
        unreadable = next((f". {item.where}: {item.fault}" for item in file.items if item.fault), "")
        read = [name for field in fields.values() for name in field.names]
        raise ValueError(
            f"{file.path}: {file.items[0].where}: no key {' or '.join(field.names)}; "
            f"found {', '.join(found) or 'none'}. This format reads the keys {', '.join(read)}{unreadable}"
        )


def _plan(file: TraceFile, fields: Mapping[str, Field], chosen: dict[str, str]) -> Plan:
    arrival = fields.get("arrival")
    if arrival and "arrival" not in chosen and not file.draws_arrivals:
        chosen = {"arrival": arrival.names[0]} | chosen  # which every object lacks
    return [(name, chosen[name], field) for name, field in fields.items() if name in chosen]


def _read_item(item: Item, plan: Plan, draws_arrivals: bool) -> list[Any] | BadRow:
    if item.fault:
        return BadRow(item.where, "no JSON object", item.fault)
    values = []
    for name, key, field in plan:
        cell = item.value.get(key, REQUIRED)
        is_missing = cell is REQUIRED or (name == "arrival" and cell is None)
        if is_missing and name == "arrival" and draws_arrivals:
            values.append(math.nan)
            continue
        try:
            if cell is REQUIRED:
                raise ValueError("every request of the file must have it")
            values.append(field.read(cell))
        except ValueError as error:
            reason = NO_ARRIVAL if is_missing and name == "arrival" else key
            return BadRow(item.where, reason, f"{key} is {_found(cell)}; {error}")
    return values


def _found(cell: Any) -> str:
    if cell is REQUIRED:
        return "missing"
    return "empty" if isinstance(cell, str) and not cell.strip() else shown(cell)
