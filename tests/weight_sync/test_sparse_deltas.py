"""Deltas into a real engine: it holds the bytes of a dense push, whatever happened on the way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from generator.engine import Engine
from tests.tiny import EVERY, ModuleLearner, OneEngine, change_a_little, tiny_llama
from weight_sync import gloo_trainer
from weight_sync.digest import digest
from weight_sync.push import Pusher, PushError
from weight_sync.source import DeepSpeedSource

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

versions = itertools.count(2000)


def digests_of(model: torch.nn.Module) -> dict[str, int]:
    return {name: digest(tensor) for name, tensor in DeepSpeedSource(model, bucket_bytes=1)}


def digests_of_the_shadow(worker: Any) -> dict[str, int]:
    from weight_sync.digest import digest

    return {name: digest(tensor) for name, tensor in worker.weight_transfer_engine._shadow.tensors.items()}


def forget_the_shadow(worker: Any) -> None:
    worker.weight_transfer_engine._shadow = None


async def held_by(engine: Engine) -> dict[str, int]:
    (digests,) = await engine.llm.collective_rpc(digests_of_the_shadow)
    return digests


def pusher(engine: Engine, model: torch.nn.Module, staging: Any = None) -> Pusher:
    learner = ModuleLearner(model, engine, staging=staging, deltas=True)
    return Pusher(
        learner, OneEngine(engine), timeout=120.0, verification=EVERY, staged=staging is not None, deltas=True
    )


@pytest.mark.parametrize("staging", [None, "device", "host"])
async def test_after_deltas_an_engine_holds_the_bytes_that_a_dense_push_brings_and_computes_with_them(engine, staging):
    model = tiny_llama(5)
    run = pusher(engine, model, staging)
    report = await run.push(next(versions))
    assert report.bytes == report.dense_bytes
    for seed in range(3):
        change_a_little(model, seed)
        report = await run.push(next(versions))  # digests of what travels, and a canary, are compared
        assert 0 < report.bytes < 0.1 * report.dense_bytes
        assert report.canary is not None
        assert await held_by(engine) == digests_of(model)
    unchanged = await run.push(next(versions))
    assert unchanged.bytes == 0
    assert unchanged.canary is not None
    assert engine.version == unchanged.version
    assert await held_by(engine) == digests_of(model)


async def test_what_changed_altogether_is_sent_whole(engine):
    model = tiny_llama(5)
    run = pusher(engine, model)
    await run.push(next(versions))
    model.load_state_dict(tiny_llama(6).state_dict())
    report = await run.push(next(versions))
    assert report.bytes == report.dense_bytes
    assert await held_by(engine) == digests_of(model)


@pytest.mark.parametrize("staging", [None, "device"])
async def test_a_delta_that_is_damaged_on_the_way_is_found_and_the_next_push_is_whole(engine, staging, monkeypatch):
    model = tiny_llama(5)
    run = pusher(engine, model, staging)
    await run.push(next(versions))
    change_a_little(model, 0)
    pack = gloo_trainer.pack

    def damaged(tensors: Any) -> torch.Tensor:
        packed = pack(tensors)
        packed[-1] ^= 4  # in the last value of a tensor
        return packed

    monkeypatch.setattr(gloo_trainer, "pack", damaged)
    with pytest.raises(PushError, match=r"at transfer.*did not arrive as they were sent"):
        await run.push(next(versions))
    monkeypatch.undo()
    await assert_the_next_push_is_whole(engine, model, run)


async def assert_the_next_push_is_whole(engine: Engine, model: torch.nn.Module, run: Pusher) -> None:
    await run.learner.connect()
    change_a_little(model, 1)
    report = await run.push(next(versions))
    assert report.bytes == report.dense_bytes
    assert await held_by(engine) == digests_of(model)
    change_a_little(model, 2)
    report = await run.push(next(versions))
    assert report.bytes < report.dense_bytes
    assert await held_by(engine) == digests_of(model)


async def test_a_learner_that_falls_over_in_the_middle_of_a_delta_sends_everything_next(engine, monkeypatch):
    model = tiny_llama(5)
    run = pusher(engine, model)
    await run.push(next(versions))
    change_a_little(model, 0)

    def dying(self: Any, manifest: Any) -> Iterator[torch.Tensor]:
        yield from itertools.islice(whole(self, manifest), 1)
        raise RuntimeError("the learner fell over")

    whole = gloo_trainer.GlooTrainerWeightTransferEngine._packed
    monkeypatch.setattr(gloo_trainer.GlooTrainerWeightTransferEngine, "_packed", dying)
    with pytest.raises(PushError, match="the learner fell over"):
        await run.push(next(versions))
    monkeypatch.undo()
    await assert_the_next_push_is_whole(engine, model, run)


async def test_a_delta_from_something_else_than_the_engine_holds_is_refused(engine):
    model = tiny_llama(5)
    run = pusher(engine, model)
    served = await run.push(next(versions))
    change_a_little(model, 0)
    await engine.llm.collective_rpc(forget_the_shadow)
    with pytest.raises(PushError, match=f"a delta from version {served.version} was announced, but no version"):
        await run.push(next(versions))
    await assert_the_next_push_is_whole(engine, model, run)
