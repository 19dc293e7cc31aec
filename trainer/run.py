"""Wiring: builds the parts of a run, owns their lifetime, tears them down in order, and turns the end into an exit code.

The algorithm is in ``trainer.loop``; nothing here decides what is sampled or learned.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weight_sync.push import Pusher

from generator.pool import EnginePool
from generator.rollout import Prompt
from generator.task import DataError, ModelError, Task, TaskContext, TaskData
from trainer.admission import Admission
from trainer.checks import ConfigError
from trainer.config import Config
from trainer.data import PromptStream, build_prompts
from trainer.dotted import DottedPathError, resolve_dotted
from trainer.learner import LearnerSpec
from trainer.learner_group import LearnerGroup
from trainer.loop import Parts, step_done, train
from trainer.model import ResolvedModel, hub_reachable, load_tokenizer, resolve_model
from trainer.placement import (
    device_kind,
    engine_resources,
    engine_settings,
    prompt_limit,
    transfer_backend,
)
from trainer.rewards import RewardPart, RewardScorer, resolve_rewards
from trainer.state import LEARNER_FOLDER, continue_from, find_checkpoint, read_state, save_checkpoint
from trainer.watch import RunFolderError, Watch

logger = logging.getLogger(__name__)

EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130
GROUPS_PER_ENGINE_ROOM = 2
"""Rollouts in flight over what the engines can run at a time, so that an engine never waits for the driver."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that can be known, and can be wrong, before an engine starts."""

    data: TaskData
    model: ResolvedModel
    tokenizer: Any
    prompts: list[Prompt]
    rewards: tuple[RewardPart, ...]


def run(config: Config) -> int:
    """Run to the end and return the exit code. Raises :class:`ConfigError` for bad input, before engines start."""
    try:
        inputs = load_inputs(config)
        checkpoint = find_checkpoint(config)
        resume_step = read_state(checkpoint).step if checkpoint else None
        watch = Watch(config, config.run_dir, resume_step=resume_step)
    except (DataError, ModelError, DottedPathError, RunFolderError) as error:
        raise ConfigError(str(error)) from error
    logging.basicConfig(handlers=[watch.log_handler], level=logging.WARNING, format="%(message)s")
    watch.source("data", inputs.data.source, inputs.data.reason)
    watch.source("model", inputs.model.source, inputs.model.reason)
    watch.source("hardware", f"{device_kind(config)}, {inputs.model.dtype}", f"hardware={config.hardware}")
    try:
        watch.waiting("starting Ray")
        with _ray_session(config):
            return asyncio.run(supervise(config, inputs, watch, checkpoint))
    except KeyboardInterrupt:  # before the event loop has its signal handlers
        watch.close("interrupted")
        return EXIT_INTERRUPTED


def load_inputs(config: Config) -> Inputs:
    """Load data, model folder, tokenizer and reward functions; all of them cheap, none starts a process."""
    task: Task = resolve_dotted(config.task, "task")()
    context = TaskContext(config.data.path, config.data.options, hub_reachable, config.seed)
    data = task.load(context)
    rewards = resolve_rewards(config.reward, task.rewards())
    model = resolve_model(
        config.model.path,
        hub_id=config.model.hub_id,
        cache_dir=config.model.cache_dir,
        device_kind=device_kind(config),
        dtype=config.model.dtype,
    )
    tokenizer = load_tokenizer(model.path)
    prompts = build_prompts(data.rows, task.prompt, tokenizer, max_tokens=prompt_limit(config, model))
    return Inputs(data, model, tokenizer, prompts, rewards)


async def supervise(config: Config, inputs: Inputs, watch: Watch, checkpoint: Path | None) -> int:
    """Run the training task under the signal handlers; however it ends, write the summary and return the exit code."""
    task = asyncio.current_task()
    assert task is not None
    with _interrupts(task):
        try:
            async with _parts(config, inputs, watch) as parts:
                if checkpoint is not None:
                    watch.source("resume", str(checkpoint), f"resume={config.resume}")
                    continue_from(checkpoint, parts)
                    await parts.learner.load(str(checkpoint / LEARNER_FOLDER))
                watch.begin()
                await train(parts)
                watch.waiting("writing the final checkpoint and export")
                await save_final(parts)
            await asyncio.to_thread(watch.close, "done")
            return EXIT_DONE
        except asyncio.CancelledError:
            task.uncancel()
            await asyncio.to_thread(watch.close, "interrupted")
            return EXIT_INTERRUPTED
        except Exception as error:
            logger.debug("%s", "".join(traceback.format_exception(error)))
            await asyncio.to_thread(watch.close, "failed", root_cause(error))
            return EXIT_FAILED


@asynccontextmanager
async def _parts(config: Config, inputs: Inputs, watch: Watch) -> AsyncIterator[Parts]:
    """Start everything, side by side where possible; end everything, in reverse order, whatever happened."""
    async with AsyncExitStack() as stack:
        stream = PromptStream(inputs.prompts, seed=config.seed, shuffle=config.data.shuffle)
        engines = EnginePool(
            engine_settings(config, inputs.model, stream.longest_prompt),
            engine_resources(config),
            config.engine.start_timeout,
            config.weight_sync.timeout,
        )
        learner = LearnerGroup(
            LearnerSpec(
                model_path=inputs.model.path,
                dtype=inputs.model.dtype,
                device="cpu" if device_kind(config) == "cpu" else "cuda",
                temperature=config.sampling.temperature,
                seed=config.seed,
                trust_remote_code=config.model.trust_remote_code,
                learner=config.learner,
                optimizer=config.optimizer,
                algorithm=config.algorithm,
            ),
            backend=transfer_backend(config),
            weight_sync=config.weight_sync,
        )
        stack.push_async_callback(learner.close)
        stack.push_async_callback(engines.shutdown)
        watch.waiting(f"starting {config.engine.count} engine(s) and {config.learner.ranks} learner rank(s)")
        async with asyncio.TaskGroup() as starting:
            starting.create_task(engines.start())
            starting.create_task(learner.start())
        watch.waiting("connecting learner and engines, pushing version 0")
        await learner.connect(engines.handles, workers_per_engine=config.engine.tensor_parallel)
        room = max(
            1, config.engine.count * config.engine.max_running * GROUPS_PER_ENGINE_ROOM // config.sampling.group_size
        )
        parts = Parts(
            config=config,
            prompts=stream,
            engines=engines,
            rewards=RewardScorer(inputs.rewards, timeout=config.rewarding.timeout, workers=config.rewarding.workers),
            decode=lambda ids: inputs.tokenizer.decode(ids, skip_special_tokens=True),
            learner=learner,
            pusher=Pusher(learner, engines, config.weight_sync.timeout),
            admission=Admission(
                batch_prompts=config.batch.prompts,
                max_versions=config.staleness.max_versions,
                max_running=config.staleness.max_running_groups or room,
                total_groups=config.steps * config.batch.prompts,
            ),
            watch=watch,
        )
        try:
            yield parts
        except asyncio.CancelledError:
            watch.waiting("interrupted: writing a checkpoint")
            await save_on_interrupt(parts)
            raise


async def save_final(parts: Parts) -> None:
    """The last checkpoint, and a folder that transformers and vLLM load."""
    await save_checkpoint(parts)
    await parts.learner.export(str(Path(parts.config.run_dir) / "export"))


async def save_on_interrupt(parts: Parts) -> None:
    """A checkpoint after the optimizer steps made so far; the step in progress is given up."""
    try:
        async with asyncio.timeout(parts.config.shutdown.timeout):
            await parts.learner.interrupt()
            # The step may have been made just before the interrupt; only the learner knows.
            if await parts.learner.steps_done() > parts.steps_done:
                step_done(parts)
            path = await save_checkpoint(parts)
        parts.watch.source("checkpoint", str(path), "the same command with this run_dir continues from it")
    except Exception as error:
        logger.error("no checkpoint could be written on interrupt: %r", error)


@contextlib.contextmanager
def _ray_session(config: Config) -> Iterator[None]:
    """The configured cluster, or a local instance that listens on loopback only and ends with the run."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    # It announces at every start that its token authentication is on, which is what we want.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    local = {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "object_store_memory": 256 << 20}
    where: dict[str, Any] = local if config.ray.address is None else {"address": config.ray.address}
    ray.init(log_to_driver=False, logging_level=logging.WARNING, **where)
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _interrupts(task: asyncio.Task[Any]) -> Iterator[None]:
    """The first SIGINT or SIGTERM cancels ``task``; the second ends the process at once."""
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def handle() -> None:
        seen.append(1)
        if len(seen) > 1:
            os._exit(EXIT_INTERRUPTED)
        task.cancel()

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def root_cause(error: BaseException) -> BaseException:
    """The first error inside groups of errors: the one that a person wants to read."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
