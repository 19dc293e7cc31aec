"""Pushes between this process and one real vLLM engine, over gloo, proven by log-probabilities."""

import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tiny import tiny_llama
from weight_sync.client import InitRequest, UpdatePayload, UpdateRequest
from weight_sync.gloo_trainer import GlooTrainerWeightTransferEngine
from weight_sync.group import TransferGroupError, free_port
from weight_sync.push import PushError
from weight_sync.ranks import worker_rank
from weight_sync.sender import WeightSender
from weight_sync.source import DeepSpeedSource, NonFiniteWeightError

pytestmark = pytest.mark.engine

PROMPT = [5, 17, 3, 60, 42, 9, 71, 2, 33]
TIMEOUT = 60.0
BUCKET_BYTES = 50_000


class LocalClient:
    """vLLM's weight sync client over an ``AsyncLLM`` of this process, on an event loop in a thread of its own."""

    def __init__(self, llm: Any, run: Callable[[Any], Any]) -> None:
        self.version: int | None = None
        self._llm, self._run = llm, run

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._run(self._llm.init_weight_transfer_engine(InitRequest(init_info)))

    def start_weight_update(self) -> None:
        self._run(self._llm.start_weight_update())

    def update_weights(self, update_info: UpdatePayload) -> None:
        self._run(self._llm.update_weights(UpdateRequest(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._run(self._llm.finish_weight_update(weight_version or str(self.version)))

    def abandon(self, reason: str) -> None:
        with pytest.raises(Exception, match=r"abandoned|start_weight_update must be called"):
            self._run(self._llm.update_weights(UpdateRequest({"abandoned": reason})))


class Engine:
    """One real engine and what the tests ask of it."""

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.llm = self.run(self._start(folder))
        self.client = LocalClient(self.llm, self.run)

    async def _start(self, folder: Path) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(folder),
                skip_tokenizer_init=True,
                dtype="float32",
                enforce_eager=True,
                max_model_len=64,
                max_num_seqs=4,
                kv_cache_memory_bytes=64 << 20,
                distributed_executor_backend="uni",
                weight_transfer_config=WeightTransferConfig(backend="gloo"),
            )
        )

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=300)

    def logprobs(self) -> torch.Tensor:
        """The engine's log-probability of each prompt token after the first, float32, shape ``[prompt - 1]``."""
        return self.run(self._logprobs())

    async def _logprobs(self) -> torch.Tensor:
        from vllm import SamplingParams

        await self.llm.reset_prefix_cache()
        parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        async for output in self.llm.generate({"prompt_token_ids": PROMPT}, parameters, request_id=os.urandom(4).hex()):
            final = output
        rows = zip(final.prompt_logprobs[1:], PROMPT[1:], strict=True)
        return torch.tensor([row[token].logprob for row, token in rows])

    def version(self) -> str:
        return self.run(self.llm.get_weight_version())

    def connected_sender(self, source: DeepSpeedSource) -> WeightSender:
        sender = WeightSender(source, backend="gloo", bucket_bytes=BUCKET_BYTES, timeout=TIMEOUT)
        sender.connect_client(self.client, "127.0.0.1", 0, 2)
        return sender

    def stop(self) -> None:
        self.llm.shutdown()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=30)


def expected_logprobs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


def assert_serves(engine: Engine, model: torch.nn.Module) -> None:
    torch.testing.assert_close(engine.logprobs(), expected_logprobs(model), atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def model_a() -> torch.nn.Module:
    return tiny_llama(1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, model_a: torch.nn.Module) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(0).save_pretrained(folder)
    with pytest.MonkeyPatch.context() as environment:
        # With it, vLLM 0.32 turns "uni" into "mp" on CPU and spawns one more process.
        environment.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        environment.setenv("OMP_NUM_THREADS", "1")
        started = Engine(folder)
    yield started
    started.stop()


class Partial(DeepSpeedSource):
    """A source that leaves out a tensor, or sends it in another shape or under two names: a learner with a defect."""

    def __init__(self, model: torch.nn.Module, *, without: str = "", halved: str = "", twice: str = "") -> None:
        super().__init__(model, bucket_bytes=BUCKET_BYTES)
        self._without, self._halved, self._twice = without, halved, twice

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        kept = [(name, tensor) for name, tensor in super()._tensors() if name != self._without]
        kept += [(f"{name}_2", tensor) for name, tensor in kept if name == self._twice]
        return [(name, tensor[:1] if name == self._halved else tensor) for name, tensor in kept]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.embed_tokens.weight",
        "model.layers.1.input_layernorm.weight",
    ],
)
def test_a_first_push_that_lacks_a_tensor_is_refused_by_its_name(engine, model_a, name):
    # Runs before any good push: there is no accepted manifest to compare with, only the model itself.
    sender = engine.connected_sender(Partial(model_a, without=name))
    with pytest.raises(PushError, match=name.removesuffix(".weight")):
        sender.send(0)
    assert engine.version() != "0"


def test_a_first_push_with_a_wrong_shape_is_refused_by_name_after_the_stream_is_drained(engine, model_a):
    sender = engine.connected_sender(Partial(model_a, halved="model.layers.0.self_attn.k_proj.weight"))
    with pytest.raises(PushError, match=r"model\.layers\.0\.self_attn\.k_proj\.weight"):
        sender.send(0)


def test_a_first_push_with_a_tensor_that_the_model_does_not_know_is_refused_by_its_name(engine, model_a):
    sender = engine.connected_sender(Partial(model_a, twice="model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(PushError, match=r"model\.layers\.1\.mlp\.up_proj\.weight_2"):
        sender.send(0)
    assert engine.version() != "0"


def test_a_first_push_in_a_dtype_that_the_engine_does_not_hold_is_refused_by_name_before_the_model_is_touched(engine):
    before = engine.logprobs()
    sender = engine.connected_sender(DeepSpeedSource(tiny_llama(2), dtype=torch.float64, bucket_bytes=BUCKET_BYTES))
    complaint = r"engine holds weights in torch\.float32, .*: model\.embed_tokens\.weight is float64; .* more"
    with pytest.raises(PushError, match=complaint):
        sender.send(0)
    assert torch.equal(engine.logprobs(), before)


def test_pushes_of_a_then_b_then_a_are_served_exactly_tied_head_included(engine, model_a):
    live = tiny_llama(1)
    sender = engine.connected_sender(DeepSpeedSource(live, bucket_bytes=10_000))
    for version, seed in enumerate([1, 2, 1]):
        live.load_state_dict(tiny_llama(seed).state_dict())
        manifest = sender.prepare()
        assert sender.send(version) == manifest.total_bytes > 2 * BUCKET_BYTES
        assert engine.version() == str(version)
        assert_serves(engine, live)
    assert_serves(engine, model_a)
    assert (expected_logprobs(tiny_llama(2)) - expected_logprobs(model_a)).abs().max() > 0.1
    sender.close()


@pytest.mark.parametrize(
    ("defect", "complaint"),
    [
        ({"without": "model.norm.weight"}, r"missing: model\.norm\.weight"),
        ({"halved": "model.layers.0.mlp.up_proj.weight"}, r"wrong shape: model\.layers\.0\.mlp\.up_proj\.weight"),
    ],
)
def test_a_later_push_that_differs_is_refused_before_the_model_is_touched(engine, model_a, defect, complaint):
    good = engine.connected_sender(DeepSpeedSource(model_a, bucket_bytes=50_000))
    good.send(10)
    good.close()
    sender = engine.connected_sender(Partial(tiny_llama(3), **defect))
    with pytest.raises(PushError, match=complaint):
        sender.send(11)
    assert engine.version() == "10"
    assert_serves(engine, model_a)


def test_a_group_is_not_used_again_after_a_failure_and_a_new_one_works(engine, model_a):
    sender = engine.connected_sender(Partial(model_a, without="model.norm.weight"))
    with pytest.raises(PushError):
        sender.send(20)
    with pytest.raises(PushError, match="connect before the push"):
        sender.send(20)
    model_b = tiny_llama(2)
    sender = engine.connected_sender(DeepSpeedSource(model_b, bucket_bytes=50_000))
    sender.send(21)
    assert_serves(engine, model_b)
    sender.close()


def test_a_non_finite_weight_is_refused_by_name_before_the_engine_hears_of_it(engine):
    model = tiny_llama(4)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 3] = float("nan")
    sender = engine.connected_sender(DeepSpeedSource(model, bucket_bytes=50_000))
    version, before = engine.version(), engine.logprobs()
    with pytest.raises(NonFiniteWeightError, match=r"layers\.1\.mlp\.down_proj\.weight"):
        sender.prepare()
    assert engine.version() == version
    assert torch.equal(engine.logprobs(), before)
    sender.close()


def test_a_sender_that_dies_in_mid_stream_fails_the_engine_s_update_and_a_full_push_repairs_it(engine, model_a):
    class Dying(DeepSpeedSource):
        def __iter__(self):
            for count, pair in enumerate(super().__iter__()):
                if count == 12:
                    raise RuntimeError("the learner fell over")
                yield pair

    sender = engine.connected_sender(Dying(tiny_llama(2), bucket_bytes=BUCKET_BYTES))
    with pytest.raises(PushError, match="the learner fell over"):
        sender.send(30)
    sender = engine.connected_sender(DeepSpeedSource(model_a, bucket_bytes=50_000))
    sender.send(31)
    assert_serves(engine, model_a)
    sender.close()


def test_a_port_that_is_taken_is_an_error_on_the_sender_that_names_it(engine, model_a):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        sender = WeightSender(
            DeepSpeedSource(model_a, bucket_bytes=50_000), backend="gloo", bucket_bytes=50_000, timeout=10.0
        )
        with pytest.raises(PushError, match=f"connect.*127.0.0.1:{port}") as caught:
            sender.connect_client(engine.client, "127.0.0.1", port, 2)
    assert isinstance(caught.value.cause, TransferGroupError)
    assert_takes_a_push(engine, model_a, 40)


def test_an_address_that_does_not_resolve_is_an_error_on_either_side_that_names_it(engine, model_a):
    sender = WeightSender(DeepSpeedSource(model_a, bucket_bytes=50_000), backend="gloo", bucket_bytes=50_000, timeout=3)
    with pytest.raises(
        PushError, match=r"at connect: .* cannot listen at 'no-such-host\.invalid' \(weight_sync\.address"
    ):
        sender.connect_client(engine.client, "no-such-host.invalid", 0, 2)
    invitation = {"master_address": "no-such-host.invalid", "master_port": 29500, "rank_offset": 1, "world_size": 2}
    with pytest.raises(Exception, match=r"rank 1 could not join .* at no-such-host\.invalid:29500 within 2 s"):
        engine.client.init_weight_transfer_engine({**invitation, "timeout_seconds": 2.0})
    assert_takes_a_push(engine, model_a, 41)


def test_a_sender_that_never_comes_ends_the_engine_s_wait_for_it_and_leaves_it_fit_to_join_another(engine, model_a):
    invitation = {"master_address": "127.0.0.1", "master_port": free_port("127.0.0.1"), "rank_offset": 1}
    with pytest.raises(Exception, match=r"rank 1 could not join .* within 2 s"):
        engine.client.init_weight_transfer_engine({**invitation, "world_size": 2, "timeout_seconds": 2.0})
    assert_takes_a_push(engine, model_a, 42)


def assert_takes_a_push(engine: Engine, model: torch.nn.Module, version: int) -> None:
    sender = engine.connected_sender(DeepSpeedSource(model, bucket_bytes=50_000))
    sender.send(version)
    assert_serves(engine, model)
    sender.close()


@pytest.mark.parametrize(("replica", "worker"), [(0, 0), (0, 1), (1, 0), (2, 1)])
def test_vllm_s_own_transports_give_a_worker_the_same_rank(monkeypatch, replica, worker):
    from vllm.distributed.weight_transfer import nccl_common

    place = SimpleNamespace(data_parallel_index=replica, world_size=2, rank=worker)
    taken: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(nccl_common, "stateless_init_process_group", lambda *a, device: taken.append(a[2]))
    where = {"master_address": "127.0.0.1", "master_port": 29500}
    nccl_common.worker_init_process_group(
        nccl_common.NCCLWeightTransferInitInfo(**where, rank_offset=3, world_size=20), place
    )
    assert taken == [
        worker_rank(rank_offset=3, data_parallel_index=replica, workers_per_replica=2, rank_in_replica=worker)
    ]


def test_the_trainer_side_has_the_methods_of_the_class_that_it_stands_in_for():
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine

    def calls(cls: type) -> dict[str, list[str]]:
        methods = inspect.getmembers(cls, callable)
        return {name: list(inspect.signature(m).parameters) for name, m in methods if not name.startswith("_")}

    theirs = calls(TrainerWeightTransferEngine)
    assert set(theirs) == {"trainer_init", "send_weights", "shutdown"}
    assert calls(GlooTrainerWeightTransferEngine) == theirs
