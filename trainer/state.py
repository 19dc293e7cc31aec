"""Checkpoints: everything a run needs to go on after its process is gone.

A checkpoint is a folder ``checkpoints/step_<n>/``: the learner (weights, optimizer, written by DeepSpeed) and
``state.json`` (position in the data, totals). It is written beside its final place and renamed, so a torn one is never
taken for a whole one. Rollouts in flight are not part of it yet: their prompts are sampled again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checks import ConfigError
from trainer.config import Config

if TYPE_CHECKING:
    from trainer.loop import Parts

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
LEARNER_FOLDER = "learner"


@dataclass(frozen=True, slots=True)
class RunState:
    """What ``state.json`` holds."""

    step: int
    """Optimizer steps made; also the policy version."""
    model: str
    """The model folder or id that the run started from."""
    prompts: dict[str, Any]
    """Position in the data: :meth:`trainer.data.PromptStream.state_dict`."""
    totals: dict[str, Any]
    """Totals of the summary: :meth:`trainer.watch.Watch.state_dict`."""


def checkpoint_path(run_dir: str | Path, step: int) -> Path:
    """The folder of the checkpoint after ``step`` optimizer steps."""
    return Path(run_dir).absolute() / "checkpoints" / f"step_{step}"


def checkpoints(run_dir: str | Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = {}
    for path in (Path(run_dir) / "checkpoints").glob("step_*"):
        match = re.fullmatch(r"step_(\d+)", path.name)
        if match and (path / STATE_FILE).is_file():
            found[int(match[1])] = path
    return [found[step] for step in sorted(found)]


def find_checkpoint(config: Config) -> Path | None:
    """The checkpoint that ``resume`` asks for: the newest of the run folder for ``auto``, none for ``never``.

    Raises :class:`ConfigError` when ``resume`` names a folder that is no complete checkpoint.
    """
    if config.resume == "never":
        return None
    if config.resume == "auto":
        return next(reversed(checkpoints(config.run_dir)), None)
    path = Path(config.resume)
    if not (path / STATE_FILE).is_file():
        raise ConfigError(f"`resume={config.resume}`: the folder is no checkpoint (it has no {STATE_FILE})")
    return path


def read_state(checkpoint: Path) -> RunState:
    """The state in a checkpoint. Raises :class:`ConfigError` naming the file when it cannot be read."""
    try:
        return RunState(**json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"the checkpoint {checkpoint} cannot be read: {error}") from error


def commit(temporary: Path, final: Path, state: RunState, keep: int) -> None:
    """Complete the checkpoint in ``temporary``, move it to ``final``, and drop all but the newest ``keep``."""
    (temporary / STATE_FILE).write_text(json.dumps(asdict(state)), encoding="utf-8")
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    for old in checkpoints(final.parent.parent)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def continue_from(checkpoint: Path, parts: Parts) -> None:
    """Put the driver's side of a checkpoint into fresh parts. Raises :class:`ConfigError`."""
    state = read_state(checkpoint)
    if state.step > parts.config.steps:
        raise ConfigError(f"the checkpoint {checkpoint} is past `steps={parts.config.steps}`; raise it")
    parts.prompts.load_state_dict(state.prompts)
    parts.watch.load_state_dict(state.totals)
    parts.steps_done = parts.admission.version = state.step
    # After a restart the bound is the same as after a fresh start (V2).
    parts.admission.consumed = state.step * parts.admission.batch_prompts


async def save_checkpoint(parts: Parts) -> Path:
    """Write the checkpoint after the optimizer steps made so far and return its folder."""
    step = parts.steps_done
    final = checkpoint_path(parts.config.run_dir, step)
    temporary = final.with_name(f".{final.name}.writing")
    await asyncio.to_thread(shutil.rmtree, temporary, True)
    await parts.learner.save(str(temporary / LEARNER_FOLDER))
    state = RunState(step, parts.config.model.path, parts.prompts.state_dict(), parts.watch.state_dict())
    await asyncio.to_thread(commit, temporary, final, state, parts.config.checkpoint.keep)
    return final
