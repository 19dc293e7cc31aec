"""Weights that travel beside what a real engine serves, and what becomes of it when they do not arrive."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from generator.engine import Engine
from generator.link import EngineError
from generator.rollout import Rollout
from tests.brake import begun, braked
from tests.tiny import (
    BUCKET_BYTES,
    EVERY,
    ModuleLearner,
    OneEngine,
    assert_sampled_by,
    tiny_llama,
)
from weight_sync import gloo_trainer
from weight_sync.buckets import pack
from weight_sync.canary import TOLERANCES
from weight_sync.push import Pusher, PushError, PushReport
from weight_sync.source import DeepSpeedSource

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

versions = itertools.count(1000)


class Slow(ModuleLearner):
    """Sends its last tensor only after the engine has sampled more tokens than it had when the transfer began."""

    def _source(self) -> DeepSpeedSource:
        (engine,), loop = self._engines, asyncio.get_running_loop()

        def sampled() -> float:
            return asyncio.run_coroutine_threadsafe(engine.stats(), loop).result(60)["generated_tokens"]

        class Source(DeepSpeedSource):
            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                pairs = list(super().__iter__())
                yield from pairs[:-1]
                before = sampled()
                while sampled() < before + 20:
                    time.sleep(0.01)
                yield pairs[-1]

        return Source(self.model, bucket_bytes=BUCKET_BYTES)


class Dying(ModuleLearner):
    """A sender that falls over in the middle of the stream."""

    def _source(self) -> DeepSpeedSource:
        class Source(DeepSpeedSource):
            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                yield from itertools.islice(super().__iter__(), 12)
                raise RuntimeError("the learner fell over")

        return Source(self.model, bucket_bytes=BUCKET_BYTES)


async def push(engine: Engine, learner: ModuleLearner) -> PushReport:
    """One staged, proven push through a new group."""
    pusher = Pusher(learner, OneEngine(engine), timeout=120.0, verification=EVERY, staged=True)
    return await pusher.push(next(versions))


def generation(engine: Engine) -> asyncio.Task[Any]:
    return asyncio.create_task(engine.generate([Rollout(str(n), (5 + n, 17, 3)) for n in range(4)]))


@pytest.mark.parametrize("staging", ["device", "host"])
async def test_an_engine_samples_from_the_old_weights_while_the_new_ones_travel_and_then_from_the_new(
    engine, model, staging
):
    first, second = tiny_llama(2), model
    served = await push(engine, ModuleLearner(first, engine, staging=staging))
    async with braked(engine, steps=2):
        task = generation(engine)
        await begun(engine, 4)
        report = await push(engine, Slow(second, engine, staging=staging))
    assert list(report.seconds) == ["prepare", "transfer", "gate", "swap", "confirm", "verify", "publish", "resume"]
    assert report.canary is not None
    assert report.canary.abs_diff_mean < TOLERANCES["float32"].mean
    rollouts = (await asyncio.wait_for(task, 120)).rollouts
    assert_sampled_by(rollouts, {served.version: first, report.version: second})
    assert all(rollout.version_count == 2 for rollout in rollouts), "none was interrupted before the swap"


@pytest.mark.parametrize("staging", ["device", "host"])
async def test_a_transfer_that_fails_leaves_an_engine_serving_the_old_version_whole(engine, model, staging):
    served = await push(engine, ModuleLearner(model, engine, staging=staging))
    task = generation(engine)
    with pytest.raises(PushError, match=r"at transfer.*the learner fell over"):
        await push(engine, Dying(tiny_llama(2), engine, staging=staging))
    rollouts = (await asyncio.wait_for(task, 120)).rollouts
    assert_sampled_by(rollouts, {served.version: model})
    assert all(rollout.resumes == 0 for rollout in rollouts)
    report = await push(engine, ModuleLearner(tiny_llama(2), engine, staging=staging))
    assert engine.version == report.version


@pytest.mark.parametrize("staging", ["device", "host"])
async def test_damage_on_the_way_is_found_before_generation_is_disturbed(engine, model, staging, monkeypatch):
    served = await push(engine, ModuleLearner(model, engine, staging=staging))

    def damaged(tensors: Any) -> torch.Tensor:
        packed = pack(tensors)
        packed[1001 % len(packed)] ^= 4
        return packed

    monkeypatch.setattr(gloo_trainer, "pack", damaged)
    task = generation(engine)
    with pytest.raises(PushError, match=r"at transfer.*tensors did not arrive as they were sent"):
        await push(engine, ModuleLearner(tiny_llama(2), engine, staging=staging))
    rollouts = (await asyncio.wait_for(task, 120)).rollouts
    assert_sampled_by(rollouts, {served.version: model})
    assert all(rollout.resumes == 0 for rollout in rollouts)


@pytest.mark.parametrize("staging", ["device", "host"])
async def test_what_is_staged_and_never_swapped_in_is_not_served_and_does_not_stand_in_the_way(engine, model, staging):
    served = await push(engine, ModuleLearner(model, engine, staging=staging))
    learner = ModuleLearner(tiny_llama(2), engine, staging=staging)
    await learner.prepare()
    await learner.send(next(versions))
    rollouts = (await asyncio.wait_for(generation(engine), 120)).rollouts
    assert_sampled_by(rollouts, {served.version: model})
    report = await push(engine, ModuleLearner(tiny_llama(3), engine, staging=staging))
    rollouts = (await asyncio.wait_for(generation(engine), 120)).rollouts
    assert_sampled_by(rollouts, {report.version: tiny_llama(3)})


async def test_a_running_engine_swaps_nothing_in(engine, model):
    served = await push(engine, ModuleLearner(model, engine, staging="device"))
    learner = ModuleLearner(tiny_llama(2), engine, staging="device")
    await learner.prepare()
    await learner.send(version := next(versions))
    with pytest.raises(EngineError, match="not paused"):
        await engine.swap(version)
    rollouts = (await asyncio.wait_for(generation(engine), 120)).rollouts
    assert_sampled_by(rollouts, {served.version: model})


def count_what_was_made_for_pushes(worker: Any) -> tuple[int, int]:
    """Packed weights that are alive in the worker, reachable or not, and layers that vLLM keeps a record of."""
    import gc

    from vllm._custom_ops import CPUDNNLGEMMHandler
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    for thread in threading.enumerate():
        if thread.name in ("weight-staging", "weight-release"):  # what the last push held is given back in one
            thread.join()
    return sum(type(thing) is CPUDNNLGEMMHandler for thing in gc.get_objects()), len(LAYERWISE_INFO)


async def test_nothing_of_a_push_is_left_behind_whether_it_is_swapped_in_given_up_or_fails(engine, model):
    """Not even until the garbage collector comes: it would hold the memory of several models."""
    await push(engine, ModuleLearner(model, engine, staging="device"))
    before = await engine.llm.collective_rpc(count_what_was_made_for_pushes)
    for seed in range(3):
        await push(engine, ModuleLearner(tiny_llama(seed), engine, staging="device"))
    with pytest.raises(PushError):
        await push(engine, Dying(model, engine, staging="device"))
    given_up = ModuleLearner(model, engine, staging="device")
    await given_up.prepare()
    await given_up.send(next(versions))
    await push(engine, ModuleLearner(model, engine, staging="device"))
    async with asyncio.timeout(120):
        while await engine.llm.collective_rpc(count_what_was_made_for_pushes) != before:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def break_the_exchange(worker: Any) -> None:
    """The next swap puts half of the weights in and fails."""
    from weight_sync import twin

    whole = twin._exchange_tensor
    calls = itertools.count()

    def half(tensor: torch.Tensor, other: torch.Tensor) -> None:
        if next(calls) == 4:
            twin._exchange_tensor = whole
            raise MemoryError("the exchange broke")
        whole(tensor, other)

    twin._exchange_tensor = half


async def test_an_engine_whose_swap_broke_half_way_serves_nothing_until_a_whole_push(engine, model):
    served = await push(engine, ModuleLearner(model, engine, staging="device"))
    await engine.llm.collective_rpc(break_the_exchange)
    task = generation(engine)
    with pytest.raises(PushError, match=r"at swap.*the exchange broke"):
        await push(engine, ModuleLearner(tiny_llama(2), engine, staging="device"))
    with pytest.raises(EngineError, match="in the middle of a weight update"):
        await engine.resume(served.version)
    report = await push(engine, ModuleLearner(tiny_llama(3), engine, staging="device"))
    rollouts = (await asyncio.wait_for(task, 120)).rollouts
    assert_sampled_by(rollouts, {served.version: model, report.version: tiny_llama(3)})
