"""Where the rows of mathematics come from: a local file or a data set of the hub, whatever its columns are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generator.task import DataError
from recipes.files import Located, read_rows
from recipes.hub import read_from_hub

HUB_ID = "DigitalLearningGmbH/MATH-lighteval"
"""MATH, with the columns ``problem`` and ``solution``."""
FILES = ("*.parquet", "*.jsonl", "*.json", "*.csv", "README.md")
FETCH_SECONDS = 600.0
PROBLEM_COLUMNS = ("problem", "question", "prompt", "query")
ANSWER_COLUMNS = ("answer", "final_answer", "expected_answer", "ground_truth", "solution")
"""Taken where ``data.options`` names none: the first of them that the data has."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns hold the problem and the answer; ``None``: the first of the usual ones that a row has."""

    problem: str | None = None
    answer: str | None = None

    def row(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        """``row`` with the text of its problem as ``problem`` and that of its answer as ``answer``.

        Raises :class:`DataError` with ``where`` when a column is missing or unusable.
        """
        problem = self._text(row, where, "problem", self.problem, PROBLEM_COLUMNS)
        answer = reference_answer(self._text(row, where, "answer", self.answer, ANSWER_COLUMNS))
        if not answer:
            raise DataError(f"{where}: no answer is found in the column of answers")
        return {**row, "problem": problem, "answer": answer}

    def _text(
        self, row: Mapping[str, Any], where: str, what: str, name: str | None, candidates: tuple[str, ...]
    ) -> str:
        columns = ", ".join(map(str, row)) or "none"
        if name is None:
            name = next((column for column in candidates if column in row), None)
            if name is None:
                raise DataError(
                    f"{where}: none of the columns {', '.join(candidates)} is there; the columns are {columns}; name "
                    f"the one that holds the {what} with data.options.{what}"
                )
        elif name not in row:
            raise DataError(f"{where}: the column {name!r} (data.options.{what}) is missing; the columns are {columns}")
        value = row[name]
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{where}: {name!r} is {value!r:.60}, not a text")
        return value.strip()


def reference_answer(text: str) -> str:
    r"""The answer in ``text``: what its last ``\boxed{}`` holds, else what is behind its last ``####``, else all."""
    box = last_boxed(text)
    return (text.rpartition("####")[2] if box is None else box).strip()


def last_boxed(text: str) -> str | None:
    r"""What the last ``\boxed{...}`` in ``text`` holds, braces inside it balanced; ``None`` without one that ends."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return None


def read_file(path: str, columns: Columns, key: str = "data.path") -> list[dict[str, Any]]:
    """The rows of a local file: JSON lines, CSV or Parquet. Raises :class:`DataError` with file and line."""
    return _checked(read_rows(path, key), columns)


def read_hub(
    hub_id: str, subset: str | None, splits: tuple[str, str | None], columns: Columns, reachable: Callable[[], bool]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Training rows, held-out rows, and whether they were "cached" or "fetched".

    ``splits`` names the two; ``None`` is "test", if there is one. Raises :class:`recipes.hub.HubError` when the data
    set cannot be had, and :class:`DataError` when it has no such subset or split, or a row cannot be used.
    """

    def read(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        from datasets import load_dataset  # imported only when there is something to read: it takes seconds
        from datasets.exceptions import DatasetsError

        try:
            found = load_dataset(str(folder), name=subset)
        except FileNotFoundError:  # no data files: not those that are wanted are in the cache
            raise
        except (ValueError, DatasetsError) as error:  # no such subset, or files that are no data
            which = f"{hub_id} (data.options.subset={subset})" if subset else hub_id
            said = " ".join(str(error).split())
            raise DataError(f"the hub data set {which} cannot be read: {said:.300}") from error
        for split in splits:
            if split is not None and split not in found:
                raise DataError(f"the hub data set {hub_id} has no split {split!r}; there are {', '.join(found)}")

        def rows(split: str) -> list[dict[str, Any]]:
            located = ((row, f"{hub_id} {split} row {number}") for number, row in enumerate(found[split], 1))
            return _checked(located, columns)

        train, held_out = splits[0], splits[1] or "test"
        return rows(train), rows(held_out) if held_out in found else []

    (train, held_out), how = read_from_hub(hub_id, FILES, read, reachable, FETCH_SECONDS)
    return train, held_out, how


def _checked(rows: Iterable[Located], columns: Columns) -> list[dict[str, Any]]:
    return [columns.row(row, where) for row, where in rows]
