"""A run folder, read as it is: files may be missing, empty, or torn at the end by a kill.

Who writes: :mod:`trainer.watch.run_folder` and :mod:`trainer.watch.trace`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
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


def number(value: Any) -> float | None:
    """A finite number, or ``None`` for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if value - value == 0 else None
    except OverflowError:  # a whole number of hundreds of digits
        return None
