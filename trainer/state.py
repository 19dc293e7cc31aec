"""Checkpoints: everything a run needs to go on after its process is gone.

A checkpoint is a folder ``checkpoints/step_<n>/``: the learner (weights, optimizer, written by DeepSpeed), the rollouts
that wait to be learned from and those in flight, with the tokens that they have (``rollouts.jsonl``), and the position
in the data and the totals (``state.json``). The two files are of one moment: of every prompt that was handed out, the
group is kept, or there is nothing left to do. It is written beside its final place and renamed, so a torn one is never
taken for a whole one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generator.link import root_cause
from generator.resume import Sampling
from generator.rollout import Rollout, further
from generator.task import DataError
from trainer.adapter_record import check_settings
from trainer.best_checkpoint import record_best
from trainer.checkpoint_folder import (
    LEARNER_FOLDER,
    STATE_FILE,
    check_room,
    checkpoint_path,
    checkpoints,
    drop_others,
    drop_unfinished,
    move_into_place,
    put_back_replaced,
    torn,
    writing_path,
)
from trainer.checks import ConfigError
from trainer.config import CheckpointConfig, Config, SamplingConfig
from trainer.earlier_run import refuse_other_run
from trainer.groups import KeptGroups
from trainer.kept_rollouts import read_groups, write_groups
from trainer.learner_error import LearnerError
from trainer.watch.totals import RunningTotals
from trainer.zero_files import CHECKPOINT_TAG, check_stage, zero_stage

if TYPE_CHECKING:
    from trainer.data import PromptStream
    from trainer.loop import Parts

logger = logging.getLogger(__name__)

COLLECT_SECONDS = 10.0
"""How long a checkpoint waits for an engine to tell what it is sampling. What it does not tell is sampled again."""
NUMBERS_BEFORE = 1_000_000
"""Group numbers go on from so many a step where the checkpoint does not have them: more than any run had."""


@dataclass(frozen=True, slots=True)
class RunState:
    """What ``state.json`` holds."""

    step: int
    """Batches learned from; also the policy version."""
    model: str
    """The model folder or id that the run started from."""
    prompts: dict[str, Any]
    """Position in the data: :meth:`trainer.data.PromptStream.state_dict`."""
    totals: dict[str, Any]
    """Totals of the summary: :meth:`trainer.watch.Watch.state_dict`."""
    next_group: int | None = None
    """The number of the next new group. ``None``: from before checkpoints kept rollouts; there is no file of them."""
    model_source: str = ""
    """What that was: ``auto`` is another model on another machine. Empty: from before checkpoints said so."""


def find_checkpoint(config: Config) -> Path | None:
    """The checkpoint that ``resume`` asks for: the newest whole one of the run folder for ``auto``, none for ``never``.

    Raises :class:`ConfigError` when ``resume`` names a folder that is no complete checkpoint, and for ``auto`` when
    there are checkpoints and none is whole: a run is not begun again over its own results.
    """
    if config.resume == "never":
        return None
    if config.resume == "auto":
        put_back_replaced(config.run_dir)
        return _newest_whole(checkpoints(config.run_dir))
    path = Path(config.resume).absolute()
    if not (path / STATE_FILE).is_file():
        inside = f"; the newest in it is {found[-1]}" if (found := checkpoints(path)) else ""
        raise ConfigError(f"`resume={config.resume}`: the folder is no checkpoint (it has no {STATE_FILE}){inside}")
    if wrong := torn(path):
        raise ConfigError(f"`resume={config.resume}`: the checkpoint is not whole: {wrong}")
    refuse_other_run(path, config.run_dir, config.resume)
    return path


def _newest_whole(found: list[Path]) -> Path | None:
    problems = []
    for path in reversed(found):
        if not (wrong := torn(path)):
            return path
        problems.append(f"{path}: {wrong}")
        print(f"The checkpoint {path} is not whole and is left alone: {wrong}", file=sys.stderr)
    if problems:
        raise ConfigError(f"no checkpoint of the run is whole: {'; '.join(problems)}. Take another run_dir")
    return None


def load_state(
    checkpoint: Path, config: Config, prompts: PromptStream, model_source: str = "", dtype: str = "float32"
) -> tuple[RunState, KeptGroups]:
    """Read a checkpoint's state and groups, move ``prompts`` to its position, and refuse what does not fit this run.

    ``model_source`` says what ``model.path`` names here, ``dtype`` what it computes in.

    Raises :class:`ConfigError` when a file cannot be read, belongs to another model, another ZeRO stage or other
    adapters, or is past ``steps``; the stream raises ``DataError`` for other data or another seed.
    """
    try:
        state = RunState(**json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8")))
        if state.model != config.model.path:
            raise ConfigError(
                f"the checkpoint {checkpoint} is of `model.path={state.model}`, the run has `model.path="
                f"{config.model.path}`; take another run_dir"
            )
        if state.model_source and model_source and state.model_source != model_source:
            raise ConfigError(
                f"the checkpoint {checkpoint} is of the {state.model_source}, and here `model.path={config.model.path}`"
                f" is the {model_source}; set model.path to the checkpoint's model, or take another run_dir"
            )
        if state.step > config.steps:
            raise ConfigError(f"the checkpoint {checkpoint} is past `steps={config.steps}`; raise it")
        _check_stage(checkpoint, zero_stage(config.learner.zero_stage, dtype))
        _check_adapters(checkpoint, config)
        RunningTotals().load_state_dict(state.totals["totals"])
        prompts.load_state_dict(state.prompts)  # other data is refused before rollouts of it are looked for
        kept = KeptGroups(first_number=NUMBERS_BEFORE * (1 + state.step))
        if state.next_group is not None:
            kept = _resumable(read_groups(checkpoint, prompts.by_id, state.next_group), config.sampling)
            prompts.load_state_dict(state.prompts, kept.prompt_ids)
    except (ConfigError, DataError):
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ConfigError(f"the checkpoint {checkpoint} cannot be read: {type(error).__name__}: {error}") from error
    return state, kept


def _check_stage(checkpoint: Path, stage: int) -> None:
    """Raise :class:`ConfigError` for a learner of another ZeRO stage: found here before anything is started."""
    files = checkpoint / LEARNER_FOLDER / CHECKPOINT_TAG
    if not files.is_dir():
        return
    try:
        check_stage(files, stage)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_adapters(checkpoint: Path, config: Config) -> None:
    """What the learner would refuse once it is there, and engines are."""
    try:
        check_settings(checkpoint / LEARNER_FOLDER, config.learner.lora, config.learner.ranks)
    except ValueError as error:
        raise ConfigError(f"{error}; take another run_dir, or the settings of the checkpoint") from error


def _resumable(kept: KeptGroups, sampling: SamplingConfig) -> KeptGroups:
    """Where no rollout can be continued exactly (see :attr:`generator.resume.Sampling.resumable`), unfinished ones
    begin again instead."""
    presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
    if Sampling(sampling.max_tokens, presence_penalty=presence, frequency_penalty=frequency).resumable:
        return kept
    started = (
        replace(group, rollouts=tuple(one if one.finish_reason else one.first(0) for one in group.rollouts))
        for group in kept.started
    )
    return replace(kept, started=tuple(started))


def commit(
    temporary: Path,
    final: Path,
    state: RunState,
    kept: KeptGroups,
    settings: CheckpointConfig,
    in_evaluation: int | None = None,
) -> None:
    """Complete the checkpoint in ``temporary``, move it to ``final``, and drop those that need not be kept.

    The one of the version that is ``in_evaluation`` stays: it may turn out to be the best. Every other has had its
    chance, because evaluations end in the order in which they begin.
    """
    write_groups(temporary, kept)
    (temporary / STATE_FILE).write_text(json.dumps(asdict(state)), encoding="utf-8")
    move_into_place(temporary, final)
    run_dir = final.parent.parent
    best = record_best(run_dir, settings.best)
    spared = [] if in_evaluation is None else [checkpoint_path(run_dir, in_evaluation)]
    drop_others(final, settings.keep, spared if best is None else [*spared, best])


def continue_from(state: RunState, kept: KeptGroups, parts: Parts) -> None:
    """Put the counters and groups of a checkpoint into fresh parts."""
    parts.watch.load_state_dict(state.totals)
    parts.steps_done = state.step
    parts.admission.continue_at(state.step, buffered=len(kept.scored))
    parts.groups.restore(kept)


async def rollouts_now(parts: Parts, limit: float = COLLECT_SECONDS) -> dict[str, Rollout]:
    """What is known of every rollout that is being sampled or scored, by its id; engines have ``limit`` seconds to
    answer. Generation goes on meanwhile."""
    newest = {rollout.id: rollout for rollout in await parts.engines.partial_rollouts(limit)}
    for name, rollout in parts.episodes.partial_rollouts().items():
        newest[name] = further(newest.get(name, rollout), rollout)
    return newest


async def try_checkpoint(parts: Parts) -> None:
    """Write a checkpoint; if that fails, say so and leave the older ones and the run as they are."""
    try:
        await save_checkpoint(parts)
    except (OSError, LearnerError) as error:
        if not leaves_learner_usable(error, parts):
            raise
        parts.watch.count("checkpoints/failed", 1)
        logger.warning(
            "the checkpoint after step %d could not be written, the run goes on without it; older ones are whole: %s",
            parts.steps_done,
            root_cause(error),
        )


def leaves_learner_usable(error: OSError | LearnerError, parts: Parts) -> bool:
    """Whether more can be asked of the learner after a checkpoint failed with ``error``. Where a rank failed alone, the
    others wait for it in a collective of the save."""
    return not isinstance(error, LearnerError) or parts.config.learner.ranks == 1


async def save_checkpoint(parts: Parts, newest: Mapping[str, Rollout] | None = None) -> Path:
    """Write the checkpoint after the steps made so far and return its folder.

    ``newest`` is what :func:`rollouts_now` returned while rollouts were sampled; unless given, it is asked for. Raises
    ``OSError`` before anything is written when the disk has no room for another checkpoint like the last.
    """
    step, run_dir = parts.steps_done, parts.config.run_dir
    final = checkpoint_path(run_dir, step)
    temporary = writing_path(final)
    await asyncio.to_thread(_alone, parts, drop_unfinished, run_dir)
    await asyncio.to_thread(check_room, run_dir)
    try:
        # A push would wait behind this at the learner, against its deadline. An interrupt has ended the pushes, and
        # waits for nothing that still holds the lock.
        async with parts.weights if newest is None else contextlib.nullcontext():
            await parts.learner.save(str(temporary / LEARNER_FOLDER))
        if newest is None:
            newest = await rollouts_now(parts)
        # One moment: no await between here and the last of these.
        kept, position = parts.groups.kept(newest), parts.prompts.state_dict()
        totals, source = parts.watch.state_dict(), parts.model_source
        state = RunState(step, parts.config.model.path, position, totals, kept.first_number, source)
        going_on = parts.evaluations.going_on
        await asyncio.to_thread(_alone, parts, commit, temporary, final, state, kept, parts.config.checkpoint, going_on)
    except Exception:
        await asyncio.to_thread(_alone, parts, drop_unfinished, run_dir)
        raise
    return final


def _alone(parts: Parts, function: Callable[..., None], *arguments: Any) -> None:
    """An interrupt leaves a checkpoint that is being written to its thread, and writes one of the same step."""
    with parts.committing:
        function(*arguments)
