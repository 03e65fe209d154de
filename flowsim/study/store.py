"""Finished points on disk, one JSON line each, written as they finish: what a rerun need not run again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowsim.study.points import Figures

__all__ = ["Store"]


class Store:
    """The finished points of a folder's `points.jsonl`, by key; with no folder, in memory.

    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.path = None if folder is None else Path(folder) / "points.jsonl"
        self._figures: dict[str, Figures] = {}
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            self._load(self.path)

    def __len__(self) -> int:
        return len(self._figures)

    def get(self, key: str) -> Figures | None:
        """The figures of a finished point."""
        return self._figures.get(key)

    def add(self, key: str, figures: Figures, about: Mapping[str, Any]) -> None:
        """Keeps a point; `about` says in the file which one it is.

        Raises:
            OSError: it cannot be written, for example to a full disk. The points before it are safe.
        """
        self._figures[key] = figures
        if self.path is None:
            return
        line = json.dumps({"key": key, "point": about, "figures": figures}, default=str)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            kept = len(self._figures) - 1
            raise OSError(
                error.errno, f"{error.strerror}; the {kept} points before it are kept, a rerun goes on", str(self.path)
            ) from error

    def _load(self, path: Path) -> None:
        """Reads the whole lines; one that was cut short, by a full disk or a power cut, is dropped from the file."""
        whole = 0
        with path.open("rb") as file:
            for line in file:
                try:
                    row = json.loads(line)
                    key, figures = row["key"], row["figures"]
                except (ValueError, KeyError, TypeError):
                    break
                if not line.endswith(b"\n"):
                    break
                self._figures[key] = figures
                whole += len(line)
        if whole < path.stat().st_size:
            with path.open("rb+") as file:
                file.truncate(whole)
