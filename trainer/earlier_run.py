"""What an earlier run has left in the run folder, and whether this one goes on with it, begins again, or is done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf
from yaml import YAMLError  # type: ignore[import-untyped]

from trainer.checkpoint_folder import checkpoints
from trainer.checks import ConfigError, get
from trainer.config import Config
from trainer.watch.read_folder import json_object, read_config
from trainer.watch.run_folder import results_in

if TYPE_CHECKING:
    from trainer.state import RunState


def resume_step(config: Config, state: RunState | None) -> int | None:
    """The last step that the run has behind it: 0 for one that begins again, ``None`` for a fresh one."""
    if state is not None:
        return state.step
    return 0 if begins_again(config) else None


def begins_again(config: Config) -> bool:
    """Whether the run folder holds the beginning of this very run, which ended before its first checkpoint was due.

    ``resume=auto`` then starts at the beginning, in the place of what there is.
    """
    folder = Path(config.run_dir)
    if config.resume != "auto" or not config.checkpoint.every or (folder / "export").exists():
        return False
    try:
        steps = (folder / "metrics.jsonl").read_bytes().count(b"\n")
        written = read_config(folder / "config.yaml")
    except (OSError, ValueError, YAMLError):
        return False
    same = all(OmegaConf.select(written, key) == get(config, key) for key in ("name", "task", "seed", "model.path"))
    from_start = _began_from(folder) is None  # else its beginning is in another folder
    return same and from_start and steps <= config.checkpoint.every and not checkpoints(folder)


def is_done(config: Config, state: RunState) -> bool:
    """Whether the run in ``run_dir`` has come to its end, export included, and has nothing left to do."""
    try:
        summary = json_object((Path(config.run_dir) / "summary.json").read_text(encoding="utf-8")) or {}
    except (OSError, ValueError):
        return False
    return state.step == config.steps == summary.get("steps") and summary.get("status") == "done"


def refuse_other_run(checkpoint: Path, run_dir: str | Path, resume: str) -> None:
    """Raise :class:`ConfigError` where the run folder holds results of a run that ``checkpoint`` is not of.

    Continuing would remove what that run did after the step of the checkpoint. A run that began with this very
    ``resume`` may be begun so again.
    """
    folder = Path(run_dir).absolute()
    if checkpoint.parent.resolve() == (folder / "checkpoints").resolve() or not (found := results_in(folder)):
        return
    if _began_from(folder) == checkpoint.resolve():
        return
    raise ConfigError(
        f"`resume={resume}`: the run folder {folder} already holds {', '.join(found)} of a run that did not begin from "
        "this checkpoint; results of two runs are not mixed. Set run_dir to a new folder"
    )


def _began_from(folder: Path) -> Path | None:
    """The checkpoint that the run in ``folder`` was told to begin from."""
    try:
        resume = read_config(folder / "config.yaml").get("resume")
    except (OSError, UnicodeDecodeError, YAMLError):
        return None
    return Path(resume).resolve() if isinstance(resume, str) and resume not in ("auto", "never") else None
