"""What a page needs of a run folder, and what is missing from it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trainer.watch.read_folder import Steps, json_lines, json_object

CONTENTS = ("config.yaml", "metrics.jsonl", "summary.json", "trace.json", "rollouts")
"""Names of which a run folder has at least one."""


class ReportError(ValueError):
    """The report cannot be made. The message says what is wrong and what to do. Exit code 2."""


@dataclass(frozen=True)
class Run:
    """What a run folder holds."""

    path: Path
    config: Mapping[str, Any]
    """Empty where ``config.yaml`` is missing or cannot be read."""
    summary: Mapping[str, Any]
    """Empty while a run goes on, and after it was killed."""
    metrics: Collection[Mapping[str, Any]]
    """One mapping a step, in the order of steps; read from the file each time that they are gone through."""
    evaluations: Collection[Mapping[str, Any]]
    rollout_files: Mapping[int, Path]
    """By step; only steps whose rollouts were written."""
    notes: tuple[str, ...]
    """What is missing or broken, as sentences for people."""


def read_run(path: Path) -> Run:
    """Read the folder, its trace and the rollouts themselves left aside.

    Raises :class:`ReportError` when there is no such folder, or nothing in it that a run leaves.
    """
    if not path.is_dir():
        raise ReportError(f"{path} is no folder; give the run_dir of a run")
    if not any((path / name).exists() for name in CONTENTS):
        inside = [folder for folder in path.iterdir() if (folder / "config.yaml").is_file()]
        newest = f"; the newest in it is {max(inside, key=lambda folder: folder.stat().st_mtime)}" if inside else ""
        raise ReportError(f"{path} is not a run folder: it has none of {', '.join(CONTENTS)}{newest}")
    notes: list[str] = []
    config = _config(path / "config.yaml", notes)
    summary = _summary(path / "summary.json", notes)
    metrics = _steps(path / "metrics.jsonl", notes)
    if not metrics:
        notes.append("metrics.jsonl has no step: no step was finished, or the file is missing.")
    evaluations = _steps(path / "evaluations.jsonl", notes)
    files = _rollout_files(path / "rollouts")
    if not files:
        notes.append("No rollouts were written (logger.rollouts.every says of which steps they are).")
    return Run(path, config, summary, metrics, evaluations, files, tuple(notes))


class TraceEvents:
    """The events of ``trace.json``, read anew each time that they are gone through.

    It is written an event a line: a torn file gives all but its last one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (event for event in json_lines(self._path, strip=",") if event is not None and "ph" in event)


def _steps(path: Path, notes: list[str]) -> Steps:
    steps = Steps(path)
    if lines := steps.broken:
        notes.append(f"{path.name}: {lines} line{'s' * (lines > 1)} cannot be read and left out (a kill tears one).")
    return steps


def _config(path: Path, notes: list[str]) -> Mapping[str, Any]:
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except Exception as error:  # of the file system, the YAML parser and OmegaConf: three families of errors
        why = "is missing" if isinstance(error, FileNotFoundError) else "cannot be read"
        notes.append(f"config.yaml {why}: model, settings and package versions are not known.")
        return {}
    return {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}


def _summary(path: Path, notes: list[str]) -> Mapping[str, Any]:
    try:
        content = json_object(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        notes.append("summary.json is missing: the run is going on, or was killed.")
        return {}
    if content is None:
        notes.append("summary.json cannot be read.")
    return content or {}


def _rollout_files(folder: Path) -> dict[int, Path]:
    names = {path: re.fullmatch(r"step_(\d+)\.jsonl", path.name) for path in folder.glob("step_*.jsonl")}
    return dict(sorted((int(match[1]), path) for path, match in names.items() if match))
