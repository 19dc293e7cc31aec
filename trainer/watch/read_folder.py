"""A run folder, read as it is: files may be missing, empty, or torn at the end by a kill.

Who writes: :mod:`trainer.watch.run_folder` and :mod:`trainer.watch.trace`.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

FOUND = ("versions", "model_folder")
"""Keys of ``config.yaml`` that are no configuration: what was found when the run started."""


class Rows(NamedTuple):
    """The rows of a file of JSON lines by their ``step``, in the order of steps."""

    by_step: dict[int, dict[str, Any]]
    """The row without ``step``. Of a step that was made again after a restart, the later line counts."""
    broken: int
    """Lines that are no object with a step."""


def read_rows(path: Path) -> Rows:
    """``metrics.jsonl`` or ``evaluations.jsonl``; no row where the file is missing."""
    rows: dict[int, dict[str, Any]] = {}
    broken = 0
    for row in json_lines(path):
        step = None if row is None else number(row.pop("step", None))
        if row is None or step is None:
            broken += 1
        else:
            rows[int(step)] = row
    return Rows({step: rows[step] for step in sorted(rows)}, broken)


class Steps:
    """What :func:`read_rows` reads, an object a step with ``step`` in it, read anew each time that it is gone through.

    Where each step stands in the file is held, not its numbers: a long run has 100,000 steps of 200 numbers.
    Steps that are written later are left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.broken = 0
        """Lines that are no object with a step."""
        places: dict[int, int] = {}
        position = 0
        for line in _lines(path):
            if line.strip():
                step = _step_of(line)
                if step is None:
                    self.broken += 1
                else:
                    places[step] = position  # of a step that was made again after a restart, the later line counts
            position += len(line)
        self._places = array("q", (places[step] for step in sorted(places)))

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, row: object) -> bool:
        return any(row == other for other in self)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        if not self._places:
            return
        with self._path.open("rb") as file:
            for position in self._places:
                file.seek(position)
                row = json_object(file.readline().decode("utf-8", "replace").strip())
                step = None if row is None else number(row.get("step"))
                if row is not None and step is not None:
                    yield {**row, "step": int(step)}


def read_config(path: Path) -> DictConfig:
    """The configuration in a run folder's ``config.yaml``, without what is no configuration in it.

    Raises ``OSError`` and ``yaml.YAMLError``.
    """
    written = OmegaConf.load(path)
    if not isinstance(written, DictConfig):
        return DictConfig({})
    for key in FOUND:
        written.pop(key, None)
    return written


def json_lines(path: Path, strip: str = "") -> Iterator[dict[str, Any] | None]:
    """The objects of a file of JSON lines; ``None`` for a line that is none. Nothing where the file cannot be read.

    ``strip`` holds characters that may stand around an object, beside white space.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if text := line.strip(f"{strip} \t\r\n"):
                    yield json_object(text)
    except OSError:
        return


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that ``text`` is, or ``None`` where it is none."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


_OURS = re.compile(rb'\{"step": (\d{1,15})[,}].*\}\s*', re.DOTALL)


def _step_of(line: bytes) -> int | None:
    """The step of a line, told by its two ends where a run wrote it; ``None`` for a line that is no object with one."""
    if ours := _OURS.fullmatch(line):
        return int(ours[1])
    row = json_object(line.decode("utf-8", "replace").strip())
    step = None if row is None else number(row.get("step"))
    return None if step is None else int(step)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError:
        return


def number(value: Any) -> float | None:
    """A finite number, or ``None`` for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if value - value == 0 else None
    except OverflowError:  # of an integer that no float holds
        return None
