"""Which checkpoint is the best by a metric: of those that are there, the one with the largest value.

Nothing is remembered for it: the values are in ``evaluations.jsonl`` and ``metrics.jsonl``, which a run that continues
rewinds to its checkpoint, and the checkpoints are on the disk. So whatever a kill cut in two, the next look is right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.checkpoint_folder import step_of, whole_checkpoints
from trainer.watch.read_folder import number, read_rows
from trainer.watch.run_folder import write_atomically

BEST_FILE = "best.json"
"""In the folder of the checkpoints, for people and programs; a run itself does not read it."""


@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """What ``best.json`` holds."""

    checkpoint: str
    """The name of its folder, beside the file."""
    step: int
    """The step behind which it was written; also its policy version."""
    metric: str
    value: float


def best_of(values: Mapping[int, float], steps: Iterable[int]) -> int | None:
    """The step among ``steps`` with the largest of ``values``, the newest of equals; ``None`` when none has one."""
    known = [step for step in steps if math.isfinite(values.get(step, math.nan))]
    return max(known, key=lambda step: (values[step], step), default=None)


def metric_values(run_dir: Path, metric: str) -> dict[int, float]:
    """The values of a metric by step: of an evaluation for ``eval/...``, else of the step's training."""
    path = run_dir / ("evaluations.jsonl" if metric.startswith("eval/") else "metrics.jsonl")
    rows = read_rows(path).by_step
    return {step: value for step, row in rows.items() if (value := number(row.get(metric))) is not None}


def find_best(run_dir: str | Path, metric: str) -> BestCheckpoint | None:
    """The best whole checkpoint of a run by ``metric``; ``None`` when no checkpoint has a value of it."""
    folder = Path(run_dir).absolute()
    there = {step_of(path): path for path in whole_checkpoints(folder)}
    values = metric_values(folder, metric)
    step = best_of(values, there)
    return None if step is None else BestCheckpoint(there[step].name, step, metric, values[step])


def record_best(run_dir: str | Path, metric: str | None) -> Path | None:
    """Write which checkpoint is the best to ``best.json``, and return its folder; remove the file when there is none.

    ``metric`` is ``checkpoint.best``; ``None``: none is looked for.
    """
    folder = Path(run_dir).absolute() / "checkpoints"
    best = find_best(run_dir, metric) if metric else None
    if best is None:
        (folder / BEST_FILE).unlink(missing_ok=True)
        return None
    text = json.dumps(asdict(best), indent=2) + "\n"
    file = folder / BEST_FILE
    if not file.exists() or file.read_bytes() != text.encode():
        write_atomically(file, text)
    return folder / best.checkpoint
