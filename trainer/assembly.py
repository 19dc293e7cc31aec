"""Builds the parts of a run and owns their lifetime: started side by side, ended in reverse order, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from generator.pool import EnginePool
from trainer.admission import Admission
from trainer.config import Config
from trainer.data import PromptStream
from trainer.inputs import Inputs
from trainer.learner import LearnerSpec
from trainer.learner_group import LearnerGroup
from trainer.loop import Parts
from trainer.placement import device_kind, engine_resources, engine_room, engine_settings, transfer_backend
from trainer.rewards import RewardScorer
from trainer.watch import Watch
from weight_sync.push import Pusher


@asynccontextmanager
async def assemble(config: Config, inputs: Inputs, watch: Watch) -> AsyncIterator[Parts]:
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
