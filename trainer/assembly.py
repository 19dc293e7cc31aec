"""Builds the parts of a run and owns their lifetime: started side by side, ended in reverse order, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from generator.actor import RayEngine
from generator.pool import EnginePool
from generator.resume import Sampling
from trainer.admission import Admission
from trainer.best_checkpoint import record_best
from trainer.cluster import Cluster, check_resources
from trainer.collector import relax_collector
from trainer.config import Config
from trainer.conversation import TextCodec
from trainer.episodes import EpisodeSource, MultiTurn, SingleTurn, Trace
from trainer.evaluation import Evaluations, Evaluator
from trainer.evaluation_engine import EVALUATION, TRAINING, evaluation_pool, evaluation_pusher
from trainer.inputs import Inputs
from trainer.placement import (
    device_kind,
    engine_resources,
    engine_settings,
    evaluation_sampling,
    has_evaluation_engine,
    learner_gpus,
    pool_settings,
    pushes_adapters,
    running_limit,
    transfer_backend,
)
from trainer.rewards import RewardScorer
from trainer.watch import Watch
from trainer.watch.trace import ROLLOUTS
from weight_sync.canary import canary_sequences
from weight_sync.push import Pusher
from weight_sync.verification import Verification

if TYPE_CHECKING:
    from trainer.learner_group import LearnerGroup
    from trainer.loop import Parts

INNER_SHARE = 0.8
"""Calls inside a step of a push get this share of the step's deadline, so that their errors, which name the engine,
come before the step's own, which cannot."""


@asynccontextmanager
async def assemble(
    config: Config, inputs: Inputs, watch: Watch, first_step: int, cluster: Cluster
) -> AsyncIterator[Parts]:
    """Start engines and learner, and yield the parts that the algorithm works with.

    ``first_step`` is the number of steps made before, in the run that this one continues.
    """
    engines = EnginePool(lambda number: make_engine(config, inputs, first_step, number), pool_settings(config))
    evaluation_engines = None
    if has_evaluation_engine(config):
        evaluation_engines = evaluation_pool(
            lambda number: make_engine(config, inputs, first_step, number, pool=EVALUATION), pool_settings(config)
        )
    pools = [pool for pool in (engines, evaluation_engines) if pool is not None]
    async with AsyncExitStack() as stack:
        count = sum(pool.count for pool in pools)
        watch.waiting(f"starting {count} engine(s) and {config.learner.ranks} learner rank(s)")
        for pool in pools:
            pool.on_load = lambda engine, rollouts: watch.trace.counter(engine + ROLLOUTS, rollouts)
            stack.push_async_callback(pool.shutdown)
        async with asyncio.TaskGroup() as starting:
            for pool in pools:
                starting.create_task(pool.start())
            # Imports torch, which takes seconds: they pass while the engines import vLLM.
            learner = await asyncio.to_thread(_make_learner, config, inputs)
            stack.push_async_callback(learner.close)
            starting.create_task(learner.start())
        relax_collector()
        watch.waiting("connecting learner and engines, pushing the first version")
        yield _parts(config, inputs, watch, engines, evaluation_engines, learner, cluster)


def make_engine(
    config: Config,
    inputs: Inputs,
    first_step: int,
    number: int,
    *,
    pool: str = TRAINING,
    loaded_version: int | None = None,
) -> RayEngine:
    """Engine ``number`` of a pool, not started; ``loaded_version`` is that of the weights in the model folder, if it is
    to load them."""
    settings = engine_settings(
        config, inputs.model, inputs.longest_prompt, first_step, number, for_evaluations=pool == EVALUATION
    )
    if pool != TRAINING:
        settings = replace(settings, name=f"{pool} {settings.name}")
    return RayEngine(
        replace(settings, loaded_version=loaded_version),
        engine_resources(config),
        config.engine.start_timeout,
        INNER_SHARE * config.weight_sync.timeout,
    )


def _make_learner(config: Config, inputs: Inputs) -> LearnerGroup:
    from trainer.learner_group import LearnerGroup
    from trainer.learner_setup import LearnerSpec

    algorithm = replace(config.algorithm, sum_length=config.algorithm.sum_length or config.sampling.max_tokens)
    if inputs.reference is not None:
        algorithm = replace(algorithm, kl=replace(algorithm.kl, model=inputs.reference.path))
    spec = LearnerSpec(
        model_path=inputs.model.path,
        dtype=inputs.model.dtype,
        device="cpu" if device_kind(config) == "cpu" else "cuda",
        temperature=config.sampling.temperature,
        seed=config.seed,
        steps=config.steps,
        trust_remote_code=config.model.trust_remote_code,
        learner=config.learner,
        optimizer=config.optimizer,
        algorithm=algorithm,
        gpus=learner_gpus(config),
    )
    return LearnerGroup(spec)


async def connect(config: Config, learner: LearnerGroup, engines: EnginePool, pool: str = TRAINING) -> None:
    """Build the group in which weights travel: the learner's first rank and every worker of the engines there are.

    Staging and deltas spare the engines of training a pause; nobody waits for another pool.
    """
    from trainer.learner_setup import TransferSpec

    sync, training = config.weight_sync, pool == TRAINING
    members = await engines.take_members()
    await learner.connect_weights(
        TransferSpec(
            pool,
            engines=[link.handle for link in members],
            names=[link.name for link in members],
            workers=[link.workers for link in members],
            address=learner.address if sync.address == "auto" else sync.address,
            backend=transfer_backend(config),
            bucket_bytes=sync.bucket_mib << 20,
            timeout=INNER_SHARE * sync.timeout,
            staging=sync.staging_device if sync.staging and training else None,
            deltas=sync.delta and training,
            adapters=pushes_adapters(config),
        )
    )


def make_episodes(
    config: Config, inputs: Inputs, trace: Trace, engines: EnginePool, sampling: Sampling
) -> EpisodeSource:
    """What samples prompts and scores them: reward functions behind one turn, or the task's environment."""
    codec = TextCodec(inputs.tokenizer)
    drop_group = config.engine.on_failed == "drop_group"
    if inputs.environment is None:
        scorer = RewardScorer(inputs.rewards, timeout=config.rewarding.timeout, workers=config.rewarding.workers)
        return SingleTurn(engines, scorer, codec.decode, trace, drop_group, sampling)
    _ = codec.texts  # read now, while nothing runs that it would hold up
    return MultiTurn(
        inputs.environment,
        engines,
        sampling,
        codec,
        trace,
        timeout=config.rewarding.timeout,
        drop_group=drop_group,
    )


def make_evaluator(config: Config, inputs: Inputs, trace: Trace, engines: EnginePool, sampling: Sampling) -> Evaluator:
    """What evaluates a version that ``engines`` serve; ``sampling`` is that of training."""
    episodes = make_episodes(config, inputs, trace, engines, evaluation_sampling(config, sampling))
    return Evaluator(inputs.held_out, episodes, config.evaluation.rollouts, config.evaluation.pass_reward, trace)


def _evaluations(
    config: Config,
    inputs: Inputs,
    watch: Watch,
    engines: EnginePool,
    sampling: Sampling,
    pusher: Pusher | None,
) -> Evaluations:
    """``engines`` are those of training, or those that ``pusher`` brings evaluated versions to."""
    if not config.evaluation.every:
        return Evaluations()

    async def send(version: int, weights: asyncio.Lock) -> None:
        assert pusher is not None
        await engines.one_there()  # one that takes a lost one's place may be starting
        async with weights:
            with watch.trace.span("push", f"evaluation of version {version}"):
                await pusher.push(version)

    def report(version: int, metrics: dict[str, float]) -> None:
        watch.evaluation(version, metrics)
        record_best(config.run_dir, config.checkpoint.best)

    return Evaluations(
        make_evaluator(config, inputs, watch.trace, engines, sampling),
        config.evaluation.every,
        last=config.steps,
        serving=lambda: engines.serving,
        report=report,
        reported=watch.evaluated,
        send=None if pusher is None else send,
    )


def _verification(config: Config, inputs: Inputs, context: int) -> Verification:
    """How pushes are proven. Canary sequences fit the engines' context beside the token that vLLM always samples."""
    known = len(inputs.tokenizer)
    sequences = canary_sequences(min(known, inputs.model.vocabulary or known), context - 1, config.seed)
    return Verification(config.weight_sync.verify, inputs.model.dtype, sequences, pushes_adapters(config))


def _parts(
    config: Config,
    inputs: Inputs,
    watch: Watch,
    engines: EnginePool,
    evaluation_engines: EnginePool | None,
    learner: LearnerGroup,
    cluster: Cluster,
) -> Parts:
    from trainer.loop import Parts

    settings = engine_settings(config, inputs.model, inputs.longest_prompt)  # what is read of them is every engine's
    sampling = settings.sampling
    verification = _verification(config, inputs, settings.max_model_len)
    for_evaluations = None
    if evaluation_engines is not None:
        for_evaluations = evaluation_pusher(
            learner,
            evaluation_engines,
            lambda: connect(config, learner, evaluation_engines, EVALUATION),
            config.weight_sync.timeout,
            verification,
        )
    adapters = pushes_adapters(config)
    return Parts(
        config=config,
        prompts=inputs.prompts,
        engines=engines,
        episodes=make_episodes(config, inputs, watch.trace, engines, sampling),
        evaluations=_evaluations(config, inputs, watch, evaluation_engines or engines, sampling, for_evaluations),
        evaluation_engines=evaluation_engines,
        evaluation_pusher=for_evaluations,
        learner=learner,
        pusher=Pusher(
            learner,
            engines,
            config.weight_sync.timeout,
            connect=lambda: connect(config, learner, engines),
            drain_timeout=config.weight_sync.drain_timeout if config.weight_sync.mode == "wait" else 0.0,
            verification=verification,
            staged=config.weight_sync.staging,
            deltas=config.weight_sync.delta or adapters,
            dense_every=0 if adapters else config.weight_sync.dense_every,
        ),
        admission=Admission(
            batch_prompts=config.batch.prompts,
            max_versions=config.staleness.max_versions,
            max_running=running_limit(config),
            on_expired=config.staleness.on_expired,
            total_groups=config.steps * config.batch.prompts,
        ),
        watch=watch,
        model_source=inputs.model.source,
        check_resources=lambda changed: check_resources(changed, cluster),
        running_limit=running_limit,
    )
