"""One run from its configuration to its exit code: what starts before and ends after the algorithm.

The algorithm is in ``trainer.loop``; what it works with is put together in ``trainer.assembly``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from generator.link import root_cause
from trainer.best_checkpoint import record_best
from trainer.checkpoint_folder import LEARNER_FOLDER, leave_branch, whole_checkpoints
from trainer.checks import ConfigError
from trainer.cluster import Cluster, check_resources
from trainer.config import Config
from trainer.earlier_run import is_done, resume_step
from trainer.learner_error import LearnerError
from trainer.leave import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from trainer.placement import device_kind
from trainer.prepare import Prepared, prepare
from trainer.ray_session import RaySession
from trainer.signals import interrupts
from trainer.state import (
    COLLECT_SECONDS,
    continue_from,
    leaves_learner_usable,
    rollouts_now,
    save_checkpoint,
)
from trainer.watch import RunFolderError, Watch

if TYPE_CHECKING:
    from trainer.loop import Parts

COLLECT_SHARE = 0.25
"""Of ``shutdown.timeout``: what engines, and what is being cancelled, may each take of it at most."""


def run(config: Config, ray_session: RaySession) -> int:
    """Run to the end and return the exit code. Raises :class:`ConfigError` for bad input, before engines start."""
    # Until the event loop has its own handlers, SIGTERM is the same as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        prepared = prepare(config, ray_session.begin)
        inputs, state = prepared.inputs, prepared.state
        if state is not None and is_done(config, state):
            print(
                f"Nothing to do: the run in {config.run_dir} has made its {config.steps} steps. Raise `steps` to go on."
            )
            return EXIT_DONE
        watch = Watch(config, resume_step=resume_step(config, state), model_folder=inputs.model.path)
    except RunFolderError as error:
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    logging.basicConfig(handlers=[watch.log_handler], level=logging.WARNING, format="%(message)s")
    watch.source("data", inputs.data.source, inputs.data.reason)
    watch.source("model", inputs.model.source, inputs.model.reason)
    watch.source("hardware", f"{device_kind(config)}, {inputs.model.dtype}", f"hardware={config.hardware}")
    try:
        watch.waiting("starting Ray")
        cluster = ray_session.wait()
        check_resources(config, cluster)
        return asyncio.run(supervise(config, prepared, watch, cluster))
    except KeyboardInterrupt:
        watch.close("interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        watch.close("failed", error)
        if isinstance(error, ConfigError):
            raise
        write_traceback(config, error)
        return EXIT_FAILED


async def supervise(config: Config, prepared: Prepared, watch: Watch, cluster: Cluster) -> int:
    """Run the training task under the signal handlers; however it ends, write the summary and return the exit code."""
    from trainer.assembly import assemble
    from trainer.control import listening

    checkpoint, state = prepared.checkpoint, prepared.state
    task = asyncio.current_task()
    assert task is not None
    with interrupts(task):
        try:
            async with assemble(config, prepared.inputs, watch, state.step if state else 0, cluster) as parts:
                if checkpoint is not None and state is not None:
                    watch.source("resume", str(checkpoint), f"resume={config.resume}")
                    # What it refuses must not cost the checkpoints that are left below.
                    await load_learner(parts, checkpoint)
                    continue_from(state, prepared.kept, parts)
                    leave_branch(config.run_dir, state.step)
                watch.begin()
                record_best(config.run_dir, config.checkpoint.best)  # of what the run folder was rewound to
                async with listening(parts, config.run_dir):
                    await train_and_save(parts)
            await asyncio.to_thread(watch.close, "done")
            return EXIT_DONE
        except asyncio.CancelledError:
            task.uncancel()
            await asyncio.to_thread(watch.close, "interrupted")
            return EXIT_INTERRUPTED
        except Exception as error:
            await asyncio.to_thread(write_traceback, config, error)
            await asyncio.to_thread(watch.close, "failed", root_cause(error))
            return EXIT_FAILED


async def load_learner(parts: Parts, checkpoint: Path) -> None:
    """Have the learner continue from a checkpoint. Its files have the right sizes, which is not to say that they can be
    read: an error names the checkpoint, and what to do."""
    try:
        await parts.learner.load(str(checkpoint / LEARNER_FOLDER))
    except LearnerError as error:
        raise LearnerError(
            f"the checkpoint {checkpoint} cannot be loaded: {error}. If it is damaged, continue from another with "
            "`resume=PATH`"
        ) from error


async def train_and_save(parts: Parts) -> None:
    """Train; at the end, or when interrupted, save what was learned."""
    from trainer.loop import train

    training = asyncio.create_task(train(parts), name="training")
    training.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, also behind an interrupt
    try:
        # An interrupt ends the waiting, not the training: what is being sampled is asked for before it is given up.
        await asyncio.wait({training})
        training.result()
        parts.watch.waiting("writing the last checkpoint and the export")
        await save_at_the_end(parts)
    except asyncio.CancelledError:
        parts.watch.waiting(None)
        parts.watch.source("interrupted", "writing a checkpoint", "a second signal ends everything at once")
        await save_on_interrupt(parts, training)
        raise
    finally:
        training.cancel()


async def save_at_the_end(parts: Parts) -> None:
    """The last checkpoint and the export. Where there is no room for the first, there may be for the smaller one: what
    was learned is not lost with the run, which fails all the same."""
    export = str(parts.watch.run_dir.absolute() / "export")
    try:
        await save_checkpoint(parts)
    except (OSError, LearnerError) as error:
        if leaves_learner_usable(error, parts):
            await parts.learner.export(export)
        raise
    await parts.learner.export(export)


async def save_on_interrupt(parts: Parts, training: asyncio.Task[None]) -> None:
    """A checkpoint after the steps made so far; the step in progress is given up, rollouts are kept.

    Raises ``RuntimeError`` when no checkpoint could be written: the run has then failed, not been interrupted.
    """
    from trainer.loop import report_step, step_done

    try:
        async with asyncio.timeout(parts.config.shutdown.timeout):
            limit = min(COLLECT_SECONDS, COLLECT_SHARE * parts.config.shutdown.timeout)
            newest = await rollouts_now(parts, limit)
            training.cancel()
            await parts.learner.interrupt()
            await asyncio.wait({training}, timeout=limit)
            # The step may have been made just before the interrupt; only the learner knows.
            if await parts.learner.steps_done() > parts.steps_done:
                step_done(parts)
            await asyncio.to_thread(report_step, parts, {})
            path = await save_checkpoint(parts, newest)
    except Exception as error:
        what = f"not within {parts.config.shutdown.timeout:g} s (shutdown.timeout)"
        cause = what if isinstance(error, TimeoutError) else repr(root_cause(error))
        raise RuntimeError(
            f"interrupted, and no checkpoint could be written: {cause}. {_where_it_goes_on(parts.watch.run_dir)}"
        ) from error
    parts.watch.source(
        "checkpoint", str(path), f"the same command with run_dir={parts.watch.run_dir} continues from it"
    )


def _where_it_goes_on(run_dir: Path) -> str:
    """What a run has that could write no checkpoint."""
    if not (whole := whole_checkpoints(run_dir)):
        return "The run has no earlier one"
    return f"The same command with run_dir={run_dir} continues from {whole[-1].name}"


def write_traceback(config: Config, error: BaseException) -> None:
    """Keep the whole story of a failure in the run folder; people see its first cause."""
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):
        (Path(config.run_dir) / "error.txt").write_text(text, encoding="utf-8")
