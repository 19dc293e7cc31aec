"""What of a transfer through shared GPU memory can be looked at without a GPU: the control plane."""

import base64
import pickle
from dataclasses import asdict
from typing import Any

import pytest
import torch

from weight_sync.ipc import HandleClient, buffer_bytes
from weight_sync.manifest import Manifest, ManifestEntry

HANDLES = {"GPU-0": (torch.Tensor, torch.Size([8]), b"\x00handle", None)}
UPDATE = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2]], "tensor_sizes": [8], "ipc_handles": HANDLES}


class Recorder:
    """A client that writes down what is asked of it."""

    version: int | None = None

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append(("init", init_info))

    def start_weight_update(self) -> None:
        self.calls.append(("start", None))

    def update_weights(self, update_info: Any) -> None:
        self.calls.append(("update", update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(("finish", weight_version))

    def abandon(self, reason: str) -> None:
        self.calls.append(("abandon", reason))


def test_handles_of_gpu_memory_go_to_the_engine_as_text_and_everything_else_as_it_is():
    recorder = Recorder()
    client = HandleClient(recorder)
    client.init_weight_transfer_engine({"packed": True})
    client.start_weight_update()
    client.update_weights(UPDATE)
    client.finish_weight_update()
    assert [name for name, _ in recorder.calls] == ["init", "start", "update", "finish"]
    sent = recorder.calls[2][1]
    text = sent.pop("ipc_handles_pickled")
    assert pickle.loads(base64.b64decode(text)) == HANDLES
    assert sent == {**UPDATE, "ipc_handles": None}


def test_the_shared_buffer_holds_a_bucket_and_the_largest_tensor():
    manifest = Manifest((ManifestEntry("small", "float32", (2,)), ManifestEntry("large", "bfloat16", (50,))))
    assert buffer_bytes(manifest, 10) == 100
    assert buffer_bytes(manifest, 1000) == 1000


@pytest.mark.engine
def test_a_worker_of_vllm_reads_the_text_as_the_handles_that_its_trainer_side_sent(monkeypatch):
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)  # engines of other tests may have set it
    recorder = Recorder()
    HandleClient(recorder).update_weights(asdict(IPCWeightTransferUpdateInfo(**UPDATE)))
    with pytest.raises(ValueError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        IPCWeightTransferUpdateInfo(**recorder.calls[0][1])
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    assert IPCWeightTransferUpdateInfo(**recorder.calls[0][1]).ipc_handles == HANDLES
