"""A table in HTML, for objects that Jupyter shows. Knows nothing of what is in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["table"]


def table(caption: str, rows: Iterable[Sequence[object]], header: Sequence[object] = ()) -> str:
    """Rows of cells; each begins with its name. Under a header cells stand to the right, as numbers do."""
    lines = [f"<table><caption style='text-align:left'><b>{escape(caption)}</b></caption>"]
    if header:
        lines.append("<thead><tr>" + "".join(f"<th>{escape(str(cell))}</th>" for cell in header) + "</tr></thead>")
    lines.append("<tbody>")
    side = "right" if header else "left"
    for name, *cells in rows:
        shown = "".join(f"<td style='text-align:{side}'>{escape(str(cell))}</td>" for cell in cells)
        lines.append(f"<tr><th style='text-align:left'>{escape(str(name))}</th>{shown}</tr>")
    return "\n".join([*lines, "</tbody></table>"])
