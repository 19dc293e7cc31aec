"""Tiny models, and both ends of a push without actors around them, for tests and benchmarks with one real engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from generator.launch import EngineSettings
from generator.link import KvCache, PushMode
from generator.resume import Sampling
from generator.rollout import Rollout
from trainer.config import AlgorithmConfig, LearnerConfig, OptimizerConfig
from trainer.learner_setup import LearnerSpec
from trainer.lora import adapters_off
from trainer.placement import ONEDNN_PRIMITIVES
from weight_sync.canary import canary_sequences
from weight_sync.client import InitRequest, UpdatePayload, UpdateRequest
from weight_sync.ranks import group_size, rank_offsets
from weight_sync.sender import WeightSender
from weight_sync.source import DeepSpeedSource
from weight_sync.verification import Verification

if TYPE_CHECKING:
    from weight_sync.staging import StagingDevice

VOCABULARY = 97
CONTEXT = 200
"""Tokens of the engine that the tests of pushes share."""
BUCKET_BYTES = 50_000
"""Of a push: the tiny model travels in several."""
EVERY = Verification("every", "float32", canary_sequences(VOCABULARY, CONTEXT - 1))
"""Every push into an engine of the tiny model is proven."""


def tiny_llama(seed: int) -> torch.nn.Module:
    """A tied two-layer Llama with random weights, float32; its vocabulary is no multiple of vLLM's padding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,  # heads of 32: the smallest that vLLM has on CPU
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).float().eval()


def change_a_little(model: Any, seed: int) -> None:
    """Some elements of most tensors of a tiny model, tied ones and norms among them; one becomes -0.0."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if number % 5 != 4:
                chosen = torch.rand_like(parameter) < 0.02
                parameter[chosen] += 0.3 * torch.randn_like(parameter)[chosen]
        model.model.layers[1].mlp.up_proj.weight[seed, 0] = -0.0


def next_token_logprobs(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    """``[len(token_ids) - 1, vocabulary]``: log-probabilities of what follows each token but the last."""
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)


def assert_sampled_by(rollouts: list[Rollout], models: dict[int, torch.nn.Module], tolerance: float = 2e-3) -> None:
    """Every token is the likeliest one under the weights of its version, with their log-probability.

    ``tolerance`` bounds the difference of a log-probability. Two tokens nearer to each other than that are a tie,
    which vLLM's kernels may decide otherwise than transformers': of thousands of tokens one or another is.
    """
    for rollout in rollouts:
        tokens = [*rollout.prompt_token_ids, *rollout.response_token_ids]
        rows = {version: next_token_logprobs(model, tokens) for version, model in models.items()}
        assert set(rollout.versions) <= set(models)
        columns = zip(rollout.response_token_ids, rollout.versions, rollout.logprobs, strict=True)
        for position, (token, version, logprob) in enumerate(columns):
            row = rows[version][len(rollout.prompt_token_ids) - 1 + position]
            where = f"rollout {rollout.id}, position {position}, version {version}, token {token}"
            assert float(row[token]) >= float(row.max()) - tolerance, where
            # At temperature 0 vLLM reports the log-softmax of the raw logits.
            assert abs(logprob - float(row[token])) < tolerance, where


def engine_settings(folder: Any, sampling: Sampling, running: int, threads: int = 1, **changes: Any) -> EngineSettings:
    """The settings of one float32 engine on CPU, without an actor around it, for the model in ``folder``."""
    settings = EngineSettings(
        name="engine 0",
        model_path=str(folder),
        dtype="float32",
        sampling=sampling,
        max_model_len=sampling.max_model_len,
        max_running=running,
        transfer_backend="gloo",
        seed=0,
        tensor_parallel=1,
        enforce_eager=True,
        gpu_memory_utilization=0.85,
        kv_cache_bytes=64 << 20,
        rollout_timeout=900.0,
        rollout_tries=3,
        pause_timeout=120.0,
        drain_timeout=900.0,
        trust_remote_code=False,
        executor="uni",
        environment={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": str(threads),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": ONEDNN_PRIMITIVES,
        },
    )
    return replace(settings, **changes)


def learner_spec(folder: Any, **changes: Any) -> LearnerSpec:
    """The specification of a float32 learner on CPU for the model in ``folder``."""
    spec = LearnerSpec(
        model_path=str(folder),
        dtype="float32",
        device="cpu",
        temperature=1.0,
        seed=0,
        steps=100,
        trust_remote_code=False,
        learner=LearnerConfig(timeout=300.0),
        optimizer=OptimizerConfig(),
        algorithm=AlgorithmConfig(),
    )
    return replace(spec, **changes)


class LoopClient:
    """vLLM's weight sync client over :class:`generator.engine.Engine` on this event loop, called from a thread."""

    def __init__(self, engines: Sequence[Any], loop: asyncio.AbstractEventLoop) -> None:
        self.version: int | None = None
        self.workers = [engine.settings.tensor_parallel for engine in engines]
        self._engines, self._loop = engines, loop

    def _all(self, coroutines: Iterable[Any]) -> None:
        """Side by side; the first error is raised at once, and the others go on."""

        async def run() -> None:
            await asyncio.gather(*coroutines)

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(timeout=120)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        requests = [InitRequest({**init_info, "rank_offset": offset}) for offset in rank_offsets(self.workers)]
        joining = zip(self._engines, requests, strict=True)
        self._all(engine.init_weight_transfer_engine(request) for engine, request in joining)

    def start_weight_update(self) -> None:
        self._all(engine.start_weight_update() for engine in self._engines)

    def update_weights(self, update_info: UpdatePayload) -> None:
        self._all(engine.update_weights(UpdateRequest(update_info)) for engine in self._engines)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all(engine.finish_weight_update(weight_version or str(self.version)) for engine in self._engines)

    def load_adapter(self, version: int, files: Any) -> None:
        self._all(engine.load_adapter(version, files) for engine in self._engines)

    def abandon(self, reason: str) -> None:
        for engine in self._engines:
            with contextlib.suppress(Exception):  # the expected answer
                self._all([engine.update_weights(UpdateRequest({"abandoned": reason}))])


class ModuleLearner:
    """The learner's side of the push protocol over plain modules: ``model`` is what the next push sends.

    ``engines`` is one engine or several. ``sent``: what is sent in its place by a learner with a defect. ``staging``:
    where engines hold it until a swap. ``deltas``: only what changed is sent, as long as ``model`` is the same object.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        engines: Any,
        sent: torch.nn.Module | DeepSpeedSource | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        staging: StagingDevice | None = None,
        deltas: bool = False,
    ) -> None:
        self.model = model
        self._deltas = deltas
        self._staging = staging
        self._sent = sent
        self._engines = engines if isinstance(engines, Sequence) else [engines]
        self._bucket_bytes = bucket_bytes
        self._sender: WeightSender | None = None
        self._connected: torch.nn.Module | None = None

    async def prepare(self, base: int | None = None) -> Any:
        """Connect if ``model`` is another one than last time, and say what will be sent."""
        if self._sender is None or self._connected is not self.model:
            if self._sender is not None:
                self._sender.close()
            self._connected = self.model
            self._sender = self._new_sender({"backend": "gloo", "bucket_bytes": self._bucket_bytes, "timeout": 120.0})
            await self.connect()
        return self._sender.prepare(base)

    async def connect(self) -> None:
        """Build a group with the engines; again after a failure, which ends the old one."""
        assert self._sender is not None
        client = LoopClient(self._engines, asyncio.get_running_loop())
        members = group_size(client.workers)
        await asyncio.to_thread(self._sender.connect_client, client, "127.0.0.1", 0, members)

    def _new_sender(self, options: dict[str, Any]) -> WeightSender:
        return WeightSender(self._source(), staging=self._staging, deltas=self._deltas, **options)

    def _source(self) -> DeepSpeedSource:
        sent = self._sent or self.model
        return sent if isinstance(sent, DeepSpeedSource) else DeepSpeedSource(sent, bucket_bytes=self._bucket_bytes)

    async def logprobs(self, sequences: Any) -> list[list[float]]:
        """What ``model`` computes for each sequence: log-probabilities of every token but the first."""
        rows = [(next_token_logprobs(self.model, list(tokens)), torch.tensor(tokens[1:])) for tokens in sequences]
        return [logprobs.gather(1, tokens[:, None])[:, 0].tolist() for logprobs, tokens in rows]

    async def base_logprobs(self, sequences: Any) -> list[list[float]]:
        """The same with its adapters off."""
        with adapters_off(self.model):
            return await self.logprobs(sequences)

    async def send(self, version: int, hashed: bool = False) -> Any:
        """Move the weights."""
        assert self._sender is not None
        return await asyncio.to_thread(self._sender.send, version, hashed)


class OneEngine:
    """The engines' side of the push protocol for a single engine without an actor around it."""

    members_changed = False

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.version: int | None = None
        self.mode: PushMode = "abort"
        self.kv_cache: KvCache = "recompute"

    async def close_gate(self) -> None:
        await self.engine.pause(self.mode, self.kv_cache)

    async def swap(self, version: int) -> None:
        await self.engine.swap(version)

    async def confirm(self, version: int, manifest: Any) -> None:
        await self.engine.confirm(version, manifest)

    async def prompt_logprobs(self, sequences: Any) -> dict[str, list[list[float]] | None]:
        return {self.engine.name: await self.engine.prompt_logprobs(sequences)}

    def publish(self, version: int) -> None:
        self.version = version

    async def resume(self) -> None:
        assert self.version is not None
        await self.engine.resume(self.version)

    async def quarantine(self, engine: str | None, reason: str) -> bool:
        return False
