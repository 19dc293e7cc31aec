"""Where GSM8K's rows come from: a file of JSON lines, the hub, and the checks both go through."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from generator.task import DataError
from recipes.files import json_lines
from recipes.gsm8k.reward import MARK, marked_number
from recipes.hub import read_from_hub

HUB_ID = "openai/gsm8k"
COLUMNS = ("question", "answer")


def read_file(path: Path) -> list[dict[str, str]]:
    """Read JSON lines with the columns ``question`` and ``answer``.

    Blank lines are skipped; a byte order mark and Windows line ends are accepted. Raises :class:`DataError` with the
    file and line of what is wrong.
    """
    if not path.exists():
        raise DataError(f"data.path: there is no file {path} (looked in {path.absolute().parent})")
    if path.is_dir():
        raise DataError(f"data.path: {path} is a folder; give a file of JSON lines")
    try:
        located = json_lines(path, f"an object with {' and '.join(COLUMNS)}")
        rows = [checked_row(row, where) for row, where in located]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.path: {path} cannot be read as UTF-8 text: {error}") from error
    if not rows:
        raise DataError(f"data.path: {path} is empty; it needs one JSON object with question and answer a line")
    return rows


def checked_row(row: Mapping[str, Any], where: str) -> dict[str, str]:
    """``row`` itself as a dictionary, or :class:`DataError` with ``where`` when a column is missing or unusable."""
    for column in COLUMNS:
        if column not in row:
            raise DataError(f"{where}: the column {column!r} is missing; the columns are {', '.join(row) or 'none'}")
        if not isinstance(row[column], str) or not row[column].strip():
            raise DataError(f"{where}: {column!r} is {row[column]!r:.60}, not a text")
    if marked_number(row["answer"]) is None:
        missing = "does not contain" if MARK not in row["answer"] else "has no single number after"
        raise DataError(f"{where}: the answer {missing} '{MARK}'; it must end in '{MARK} <number>'")
    return dict(row)


def read_hub(reachable: Callable[[], bool]) -> tuple[list[dict[str, str]], list[dict[str, str]], str]:
    """Training rows, test rows, and whether they were "cached" or "fetched".

    Raises :class:`HubError` as :func:`recipes.hub.read_from_hub` does.
    """
    (train, test), how = read_from_hub(HUB_ID, ["main/*.parquet"], _read_folder, reachable)
    return train, test, how


def _read_folder(folder: Path) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    from datasets import Dataset  # imported only when there is something to read: it takes seconds

    splits = []
    for split in ("train", "test"):
        files = sorted(str(path) for path in (folder / "main").glob(f"{split}-*.parquet"))
        if not files:
            raise FileNotFoundError(f"the hub data set {HUB_ID} has no main/{split}-*.parquet")
        rows: Sequence[Any] = Dataset.from_parquet(files).to_list()
        splits.append([checked_row(row, f"{HUB_ID} {split} row {index}") for index, row in enumerate(rows, 1)])
    return splits[0], splits[1]
