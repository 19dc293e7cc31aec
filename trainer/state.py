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
    from trainer.data import PromptStream
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
    for path in (Path(run_dir).absolute() / "checkpoints").glob("step_*"):
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
    path = Path(config.resume).absolute()
    if not (path / STATE_FILE).is_file():
        raise ConfigError(f"`resume={config.resume}`: the folder is no checkpoint (it has no {STATE_FILE})")
    return path


def load_state(checkpoint: Path, config: Config, prompts: PromptStream) -> RunState:
    """Read a checkpoint's state, move ``prompts`` to its position, and refuse what does not fit this run.

    Raises :class:`ConfigError` when the file cannot be read, belongs to another model, or is past ``steps``; the
    stream raises ``DataError`` for other data or another seed.
    """
    try:
        state = RunState(**json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"the checkpoint {checkpoint} cannot be read: {error}") from error
    if state.model != config.model.path:
        raise ConfigError(
            f"the checkpoint {checkpoint} is of `model.path={state.model}`, the run has `model.path="
            f"{config.model.path}`; take another run_dir"
        )
    if state.step > config.steps:
        raise ConfigError(f"the checkpoint {checkpoint} is past `steps={config.steps}`; raise it")
    prompts.load_state_dict(state.prompts)
    return state


def is_done(config: Config, state: RunState) -> bool:
    """Whether the run in ``run_dir`` has come to its end, export included, and has nothing left to do."""
    try:
        summary = json.loads((Path(config.run_dir) / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return state.step == config.steps == summary.get("steps") and summary.get("status") == "done"


def commit(temporary: Path, final: Path, state: RunState, keep: int) -> None:
    """Complete the checkpoint in ``temporary``, move it to ``final``, and drop all but the newest ``keep``.

    Checkpoints of later steps belong to a branch that this run left when it continued from an older one.
    """
    (temporary / STATE_FILE).write_text(json.dumps(asdict(state)), encoding="utf-8")
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    everything = checkpoints(final.parent.parent)
    current = everything.index(final) + 1
    for old in [*everything[: max(0, current - keep)], *everything[current:]]:
        shutil.rmtree(old, ignore_errors=True)


def continue_from(state: RunState, parts: Parts) -> None:
    """Put the counters of a checkpoint into fresh parts."""
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
