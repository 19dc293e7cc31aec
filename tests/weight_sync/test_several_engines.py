"""One push into two real engines, the second of them split over two workers, proven by digests and the canary."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch

from generator.engine import Engine
from generator.launch import SEVERAL_WORKERS
from generator.resume import Sampling
from generator.rollout import Rollout
from tests.tiny import (
    EVERY,
    ModuleLearner,
    assert_sampled_by,
    change_a_little,
    engine_settings,
    tiny_llama,
)
from weight_sync.canary import TOLERANCES
from weight_sync.push import Pusher, PushError, PushReport
from weight_sync.source import DeepSpeedSource

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

CONTEXT = 200
TOKENS = 8
BUCKET_BYTES = 50_000

versions = itertools.count()


class Engines:
    """The engines' side of the push protocol, without a pool."""

    members_changed = False

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self.version = -1

    async def close_gate(self) -> None:
        for engine in self.engines:
            await engine.pause()

    async def swap(self, version: int) -> None:
        for engine in self.engines:
            await engine.swap(version)

    async def confirm(self, version: int, manifest: Any) -> None:
        for engine in self.engines:
            await engine.confirm(version, manifest)

    async def prompt_logprobs(self, sequences: Any) -> dict[str, list[list[float]] | None]:
        return {engine.name: await engine.prompt_logprobs(sequences) for engine in self.engines}

    def publish(self, version: int) -> None:
        self.version = version

    async def resume(self) -> None:
        for engine in self.engines:
            await engine.resume(self.version)

    async def quarantine(self, engine: str | None, reason: str) -> bool:
        return False


def vllm_processes() -> set[psutil.Process]:
    return {child for child in psutil.Process().children(recursive=True) if name_of(child).startswith("VLLM")}


def name_of(process: psutil.Process) -> str:
    """Nothing of one that has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(1).save_pretrained(folder)
    sampling = Sampling(max_tokens=TOKENS, temperature=0.0, max_model_len=CONTEXT)
    cores = sorted(os.sched_getaffinity(0))
    # Both engines take the environment of this process, whoever sets it.
    environment = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}", "OMP_NUM_THREADS": "1"}
    single = Engine(
        engine_settings(
            folder,
            sampling,
            running=4,
            prestart_core=True,
            environment={**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )
    )
    before = vllm_processes()  # other tests share an engine that is still there
    await single.start()
    split = Engine(
        engine_settings(
            folder,
            sampling,
            running=4,
            name="engine 1",
            tensor_parallel=2,
            executor=SEVERAL_WORKERS,
            prestart_core=True,
            environment={**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        )
    )
    await split.start()
    processes = vllm_processes() - before
    assert len(processes) == 4, "two engine cores, and two workers of one of them"
    yield [single, split]
    await split.shutdown()
    await single.shutdown()
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_llama(1)


async def push(engines: Sequence[Engine], model: torch.nn.Module, sent: Any = None) -> PushReport:
    """One proven push of ``model`` through a new group; ``sent`` travels in its place."""
    learner = ModuleLearner(model, engines, sent)
    return await Pusher(learner, Engines(engines), timeout=120.0, verification=EVERY).push(next(versions))


async def assert_served(engines: Sequence[Engine], model: torch.nn.Module, report: PushReport) -> None:
    """Every engine holds the version, computes with it as the canary says, and samples what the model would."""
    assert report.canary is not None
    assert report.canary.engines == len(engines)
    assert report.canary.abs_diff_mean < TOLERANCES["float32"].mean
    for engine in engines:
        assert engine.version == report.version
        rollouts = (await engine.generate([Rollout("r", (5, 17, 3, 60, 42))])).rollouts
        assert_sampled_by(rollouts, {report.version: model})


class Partial(DeepSpeedSource):
    """A source that leaves out a tensor: a learner with a defect."""

    def __init__(self, model: torch.nn.Module, without: str) -> None:
        super().__init__(model, bucket_bytes=BUCKET_BYTES)
        self._without = without

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor) for name, tensor in super()._tensors() if name != self._without]


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"],
)
async def test_the_workers_of_a_split_engine_name_what_a_first_push_leaves_unfilled(engines, model, name):
    # Before any good push: there is no accepted manifest to compare with, only each worker's share of the model.
    with pytest.raises(PushError, match=name.removesuffix(".weight")):
        await push(engines[1:], model, Partial(model, name))
    assert engines[1].version is None


async def test_pushes_of_a_then_b_then_a_reach_both_engines_and_are_served_exactly(engines, model):
    for sent in (model, tiny_llama(2), model):
        await assert_served(engines, sent, await push(engines, sent))


async def test_after_a_sender_that_died_in_mid_stream_both_engines_take_the_next_push(engines, model):
    """The answers of all workers to the calls that failed are read, or they would be those to the calls after."""

    class Dying(DeepSpeedSource):
        def __iter__(self):
            for count, pair in enumerate(super().__iter__()):
                if count == 12:
                    raise RuntimeError("the learner fell over")
                yield pair

    served = engines[1].version
    for _ in range(2):
        with pytest.raises(PushError, match="the learner fell over"):
            await push(engines, model, Dying(model, bucket_bytes=BUCKET_BYTES))
    assert engines[1].version == served
    other = tiny_llama(2)
    await assert_served(engines, other, await push(engines, other))


@pytest.mark.parametrize("staging", [None, "device", "host"])
async def test_staged_pushes_and_deltas_reach_every_worker_of_a_split_engine_and_are_served_exactly(engines, staging):
    live = tiny_llama(5)
    learner = ModuleLearner(live, engines, staging=staging, deltas=True)
    staged = staging is not None
    pusher = Pusher(learner, Engines(engines), timeout=120.0, verification=EVERY, staged=staged, deltas=True)
    report = await pusher.push(next(versions))
    assert report.bytes == report.dense_bytes
    await assert_served(engines, live, report)
    for seed in range(2):
        change_a_little(live, seed)
        report = await pusher.push(next(versions))
        assert 0 < report.bytes < 0.1 * report.dense_bytes
        await assert_served(engines, live, report)
