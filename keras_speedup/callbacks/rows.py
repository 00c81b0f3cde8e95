"""Rows appended to a CSV or JSON Lines file that is whole after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class RowFile:
    """A `.csv` or `.jsonl` file to which rows are appended, each in one write to the operating system.

    A process that is killed leaves whole rows; a line that something else tore is ended before the next row.

    Args:
        path: The file; its folders are made.
        columns: Every column there can be. A CSV row leaves the unknown ones empty, a JSON object leaves them out.

    Raises:
        ValueError: The file's name ends otherwise, or it is a CSV file with other columns.
    """

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str]):
        self.path, self.columns = Path(path), tuple(columns)
        if self.path.suffix not in (".csv", ".jsonl"):
            raise ValueError(f"filename must end in .csv or .jsonl, got {str(path)!r}.")
        self._header = ",".join(self.columns)
        if self.path.suffix == ".csv" and self.path.exists():
            with open(self.path, encoding="utf-8", errors="replace") as file:
                header = file.readline().rstrip("\n")
            if header not in ("", self._header):
                raise ValueError(
                    f"{self.path} has the columns {header!r}, expected {self._header!r}; name another file."
                )

    def append(self, row: Mapping[str, Any]) -> None:
        """Appends one row."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab", buffering=0) as file:
            file.write((self._before() + self._line(row)).encode())

    def _line(self, row: Mapping[str, Any]) -> str:
        if self.path.suffix == ".jsonl":
            return json.dumps({key: row[key] for key in self.columns if key in row}) + "\n"
        return ",".join(str(row.get(key, "")) for key in self.columns) + "\n"  # numbers and names without commas

    def _before(self) -> str:
        """Returns what must stand before the next row: the end of a torn line, or the header."""
        size = self.path.stat().st_size
        if size == 0:
            return f"{self._header}\n" if self.path.suffix == ".csv" else ""
        with open(self.path, "rb") as file:
            file.seek(size - 1)
            return "" if file.read(1) == b"\n" else "\n"
