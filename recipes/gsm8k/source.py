"""Where GSM8K's rows come from: a local file, the hub, and the checks both go through."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from generator.task import DataError
from recipes.files import read_rows
from recipes.gsm8k.reward import MARK, marked_number
from recipes.hub import read_from_hub

HUB_ID = "openai/gsm8k"
COLUMNS = ("question", "answer")


def read_file(path: str, key: str = "data.path") -> list[dict[str, str]]:
    """Read a file, which the configuration names as ``key``, of rows with the columns ``question`` and ``answer``.

    Raises :class:`DataError` with the file and line of what is wrong, as :func:`recipes.files.read_rows` does.
    """
    return [checked_row(row, where) for row, where in read_rows(path, key)]


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
