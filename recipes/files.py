"""Rows of a local file: JSON lines, CSV with a header, or Parquet, by the file's name. Each knows where it stands."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generator.task import DataError

Located = tuple[dict[str, Any], str]
"""A row, and where it stands, for messages: ``train.jsonl:3``."""


def read_rows(name: str | Path, key: str = "data.path") -> list[Located]:
    """The rows of the file ``name``, which the configuration names as ``key``: ``.csv``, ``.parquet``, else JSON lines.

    Blank lines are skipped; a byte order mark and Windows line ends are accepted. Raises :class:`DataError` with the
    file and line of what is wrong.
    """
    path = Path(name).expanduser()
    if not path.exists():
        raise DataError(f"{key}: there is no file {path} (looked in {path.absolute().parent})")
    if path.is_dir():
        raise DataError(f"{key}: {path} is a folder; give a file of JSON lines, CSV or Parquet")
    read = {".csv": _csv, ".parquet": _parquet}.get(path.suffix.lower(), _json_lines)
    try:
        rows = list(read(path))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{key}: {path} cannot be read: {error}") from error
    if not rows:
        raise DataError(f"{key}: {path} is empty")
    return rows


def _json_lines(path: Path) -> Iterator[Located]:
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if line.strip():
            yield _json_object(line, f"{path}:{number}"), f"{path}:{number}"


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: the line is not JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:  # an integer too long to be read
        raise DataError(f"{where}: the line cannot be read: {error}") from error
    except RecursionError as error:
        raise DataError(f"{where}: the line is nested too deeply") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: the line is a JSON {type(row).__name__}, not an object")
    return row


def _csv(path: Path) -> Iterator[Located]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            names = list(reader.fieldnames or ())
            if "" in names or len(set(names)) < len(names):
                raise DataError(
                    f"{path}:1: the first line must name each column, once; it is {', '.join(names)!r:.200}"
                )
            for row in reader:
                where = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    given = [row[name] for name in names if row[name] is not None] + list(row.get(None, ()))
                    raise DataError(f"{where}: the line has {len(given)} values for {len(names)} columns")
                yield dict(row), where
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: the line is not CSV: {error}") from error


def _parquet(path: Path) -> Iterator[Located]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: the file is not Parquet: {error}") from error
    for number, row in enumerate(rows, 1):
        yield row, f"{path} row {number}"
