"""A learner with low-rank adapters pushes into real engines: merged weights, or the adapter alone."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
import torch

from generator.engine import Engine
from generator.link import EngineError
from generator.resume import Sampling
from generator.rollout import Rollout
from tests.brake import FUNCTIONS_IN_THE_WORKER, begun, braked
from tests.tiny import (
    BUCKET_BYTES,
    CONTEXT,
    EVERY,
    VOCABULARY,
    ModuleLearner,
    OneEngine,
    assert_sampled_by,
    engine_settings,
    tiny_llama,
)
from trainer.config import LoRAConfig
from trainer.lora import add_adapters
from weight_sync import adapter_sender
from weight_sync.adapter_files import AdapterFiles, files_of
from weight_sync.adapter_sender import AdapterSender
from weight_sync.canary import TOLERANCES
from weight_sync.lora import adapted_layers
from weight_sync.push import Pusher, PushError, PushReport
from weight_sync.source import DeepSpeedSource

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

RANK = 4
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]
BLOCK = 32
LONG_PROMPT = tuple(number % VOCABULARY for number in range(3, 3 + 3 * BLOCK))
versions = itertools.count(3000)


def adapted_llama(*more: str) -> Any:
    model = tiny_llama(1)
    add_adapters(model, LoRAConfig(rank=RANK, alpha=8.0, targets=[*TARGETS, *more]))
    train(model, 0)
    return model


def train(model: Any, seed: int) -> None:
    """Other adapters, which change what the model computes."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for _, layer in adapted_layers(model):
            layer.lora_B["default"].weight.normal_(std=0.3)


def assert_proven(report: PushReport) -> None:
    assert report.canary is not None
    assert report.canary.engines == 1
    assert report.canary.abs_diff_mean < TOLERANCES["float32"].mean


# -- merged: into the engine of the other tests of pushes --------------------------------------------------------------


@pytest.mark.parametrize("staging", [None, "device"])
async def test_merged_adapters_are_what_the_engine_computes_with_as_whole_pushes_and_as_deltas(engine, staging):
    live = adapted_llama()
    learner = ModuleLearner(live, engine, staging=staging, deltas=True)
    staged = staging is not None
    pusher = Pusher(learner, OneEngine(engine), timeout=120.0, verification=EVERY, staged=staged, deltas=True)
    report = await pusher.push(next(versions))
    assert report.dense_bytes == sum(parameter.nbytes for parameter in tiny_llama(1).parameters())
    assert_proven(report)
    with torch.no_grad():
        live.model.layers[0].mlp.down_proj.lora_B["default"].weight[0] += 1.0
    report = await pusher.push(next(versions))
    assert 0 < report.bytes < 0.01 * report.dense_bytes
    assert_proven(report)


# -- alone: into an engine that holds the model and an adapter apart ---------------------------------------------------


class AdapterLearner(ModuleLearner):
    """Sends the base of its model, and the adapter."""

    def _new_sender(self, options: dict[str, Any]) -> AdapterSender:
        parts = (DeepSpeedSource(self.model, bucket_bytes=BUCKET_BYTES, lora=part) for part in ("base", "adapter"))
        return AdapterSender(*parts, **options)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def adapted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(1).save_pretrained(folder)  # type: ignore[operator]
    sampling = Sampling(max_tokens=60, temperature=0.0, max_model_len=CONTEXT)
    settings = engine_settings(
        folder, sampling, running=4, lora_rank=RANK, lora_targets=tuple(TARGETS), block_size=BLOCK
    )
    engine = Engine(replace(settings, environment=settings.environment | FUNCTIONS_IN_THE_WORKER))
    await engine.start()
    yield engine
    await engine.shutdown()


@pytest.fixture
def live() -> Any:
    return adapted_llama()


@pytest.fixture
def one_engine(adapted: Engine) -> OneEngine:
    return OneEngine(adapted)


@pytest.fixture
def pusher(adapted: Engine, one_engine: OneEngine, live: Any) -> Pusher:
    return Pusher(AdapterLearner(live, adapted), one_engine, timeout=120.0, verification=EVERY, deltas=True)


def generation(engine: Engine) -> asyncio.Task[Any]:
    return asyncio.create_task(engine.generate([Rollout(str(n), (5 + n, 17, 3)) for n in range(4)]))


async def test_an_engine_that_is_to_have_an_adapter_does_not_serve_without_one(adapted, one_engine, live):
    base = DeepSpeedSource(live, bucket_bytes=BUCKET_BYTES, lora="base")
    push = Pusher(ModuleLearner(live, adapted, base), one_engine, timeout=120.0)
    files = files_of(DeepSpeedSource(live, bucket_bytes=BUCKET_BYTES, lora="adapter"))
    with pytest.raises(EngineError, match="the engine is not paused"):
        await adapted.load_adapter(1, files)
    await adapted.pause()
    with pytest.raises(EngineError, match="holds no whole weights that the adapter"):
        await adapted.load_adapter(1, files)
    with pytest.raises(PushError, match=r"at confirm: EngineError: engine 0 holds no adapter"):
        await push.push(next(versions))


async def test_the_base_travels_once_and_then_the_adapter_alone_and_every_version_is_served_exactly(
    adapted, pusher, live
):
    report = await pusher.push(next(versions))
    assert report.bytes == report.dense_bytes == sum(parameter.nbytes for parameter in live.parameters())
    assert_proven(report)
    for seed in (1, 2):
        train(live, seed)
        report = await pusher.push(next(versions))
        assert report.bytes == sum(parameter.nbytes for parameter in live.parameters() if parameter.requires_grad)
        assert_proven(report)
        rollouts = (await asyncio.wait_for(generation(adapted), 120)).rollouts
        assert_sampled_by(rollouts, {report.version: live})


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_an_adapter_pushed_in_mid_generation_samples_exactly_the_tokens_that_are_tagged_with_it(
    adapted, pusher, one_engine, live, mode
):
    one_engine.mode = mode
    served = await pusher.push(next(versions))
    old = copy.deepcopy(live)
    async with braked(adapted, steps=2, seconds=0.5):
        task = generation(adapted)
        await begun(adapted, 4)
        train(live, 3)
        report = await pusher.push(next(versions))
    assert report.bytes < report.dense_bytes
    rollouts = (await asyncio.wait_for(task, 120)).rollouts
    assert_sampled_by(rollouts, {served.version: old, report.version: live})
    assert all(rollout.version_count == 2 for rollout in rollouts), "none was interrupted by the push"


async def test_what_the_prefix_cache_holds_of_an_older_adapter_is_not_used_even_where_it_is_kept(
    adapted, pusher, one_engine, live
):
    one_engine.mode, one_engine.kv_cache = "keep", "reuse"
    report = await pusher.push(next(versions))
    for push in range(2):
        for again in range(2):
            returned = await asyncio.wait_for(adapted.generate([Rollout(f"{push}{again}", LONG_PROMPT)]), 120)
            assert (returned.counts["tokens/cached"] > 0) == bool(again)
            assert_sampled_by(returned.rollouts, {report.version: live})
        train(live, 4 + push)
        report = await pusher.push(next(versions))


async def test_an_adapter_that_is_damaged_on_the_way_is_refused_and_the_next_push_brings_the_base_again(
    adapted, pusher, live, monkeypatch
):
    served = await pusher.push(next(versions))

    def damaged(source: DeepSpeedSource) -> AdapterFiles:
        files = files_of(source)
        return AdapterFiles(files.config, files.weights[:-1] + bytes([files.weights[-1] ^ 4]), files.checksum)

    monkeypatch.setattr(adapter_sender, "files_of", damaged)
    with pytest.raises(PushError, match=r"at transfer: ValueError: the adapter did not arrive as it was sent"):
        await pusher.push(next(versions))
    monkeypatch.undo()
    assert adapted.version == served.version
    await pusher.learner.connect()
    train(live, 7)
    report = await pusher.push(next(versions))
    assert report.bytes == report.dense_bytes
    assert_proven(report)
    rollouts = (await asyncio.wait_for(generation(adapted), 120)).rollouts
    assert_sampled_by(rollouts, {report.version: live})


async def test_an_adapter_with_layers_that_the_engine_made_no_room_for_is_refused_with_their_names(adapted, one_engine):
    """vLLM takes it, and would compute with the base in those layers. Without a proof, so that no canary looks."""
    push = Pusher(AdapterLearner(adapted_llama("o_proj"), adapted), one_engine, timeout=120.0, deltas=True)
    with pytest.raises(PushError, match=r"computes without 2 layer\(s\) .*: model\.layers\.0\.self_attn\.o_proj"):
        await push.push(next(versions))
