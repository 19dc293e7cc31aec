"""The learner's end of a push without engines: what it refuses, and what of a model with adapters it sends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from weight_sync.adapter_files import AdapterFiles, manifest_of
from weight_sync.adapter_sender import AdapterSender
from weight_sync.push_error import PushError
from weight_sync.sender import WeightSender
from weight_sync.source import DeepSpeedSource, NonFiniteWeightError

OPTIONS: dict[str, Any] = {"backend": "gloo", "bucket_bytes": 100, "timeout": 1.0}


class Engines:
    """Keeps what it is sent, or fails."""

    version: int | None = None

    def __init__(self, failure: Exception | None = None) -> None:
        self.loaded: list[tuple[int, AdapterFiles]] = []
        self._failure = failure

    def load_adapter(self, version: int, files: AdapterFiles) -> None:
        if self._failure is not None:
            raise self._failure
        self.loaded.append((version, files))


@pytest.fixture
def model() -> Any:
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    return inject_adapter_in_model(LoraConfig(r=2, target_modules=["1"]), plain)


def adapter_sender(
    model: torch.nn.Module, client: Any, source: Callable[..., DeepSpeedSource] = DeepSpeedSource, **options: Any
) -> AdapterSender:
    base, adapter = (source(model, bucket_bytes=100, lora=part) for part in ("base", "adapter"))
    sender = AdapterSender(base, adapter, **OPTIONS | options)
    sender._client = client
    return sender


def test_an_unknown_backend_is_refused_with_those_there_are():
    source = DeepSpeedSource(torch.nn.Linear(2, 2), bucket_bytes=100)
    with pytest.raises(ValueError, match=r"no weight transfer backend 'mpi': .*gloo, nccl or ipc"):
        WeightSender(source, **OPTIONS | {"backend": "mpi"})


def test_the_adapter_alone_is_sent_to_engines_that_hold_the_base(model):
    engines = Engines()
    sender = adapter_sender(model, engines)
    manifest = sender.prepare(base=6)
    assert manifest.names[:4] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    sent = sender.send(7)
    ((version, files),) = engines.loaded
    assert version == 7
    assert sorted(manifest_of(files).names) == manifest.names[4:] == ["1.lora_A.weight", "1.lora_B.weight"]
    assert sent == manifest_of(files).total_bytes == 4 * (2 * 6 + 2 * 2)


def test_engines_that_may_not_hold_the_base_are_sent_it_first(model):
    sender = adapter_sender(model, Engines())
    sender.prepare()
    with pytest.raises(PushError, match=r"at transfer: there is no transfer group; connect before the push"):
        sender.send(7)


def test_an_adapter_that_is_not_finite_is_refused_by_name(model):
    sender = adapter_sender(model, Engines())
    with torch.no_grad():
        model[1].lora_A["default"].weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteWeightError, match=r"1\.lora_A\.weight"):
        sender.prepare(base=6)


def test_an_engine_that_does_not_load_the_adapter_fails_the_push_and_ends_the_connection(model):
    sender = adapter_sender(model, Engines(PushError("load_adapter", ValueError("no such layer"), "engine 3")))
    sender.prepare(base=6)
    with pytest.raises(PushError, match="load_adapter in engine 3: ValueError: no such layer"):
        sender.send(7)
    sender.prepare(base=6)
    with pytest.raises(PushError, match="connect before the push"):
        sender.send(7)


class Sharded(DeepSpeedSource):
    """Of a learner of two ranks whose gathers, as ZeRO-3's are, are over when both have come to them."""

    def __init__(self, *arguments: Any, both: threading.Barrier, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._both = both

    @contextmanager
    def _whole(self, bucket: list[tuple[str, torch.Tensor]]) -> Iterator[None]:
        self._both.wait()
        yield


def test_a_base_that_cannot_be_sent_leaves_no_rank_behind_in_a_gather(model):
    source = partial(Sharded, both=threading.Barrier(2, timeout=120))
    first, second = (adapter_sender(model, None, source, rank=rank) for rank in range(2))
    for sender in (first, second):
        sender.prepare()
    with ThreadPoolExecutor(2) as ranks:
        sends = [ranks.submit(sender.send, 7) for sender in (first, second)]
        with pytest.raises(PushError, match="there is no transfer group"):
            sends[0].result()
        assert sends[1].result() > 0
