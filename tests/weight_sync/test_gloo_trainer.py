"""The sending side over a real gloo group, with a client that plays the engines in a thread of this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.weight_sync.punctual import LEFT, always_come
from weight_sync.buckets import plan_buckets, unpack
from weight_sync.client import UpdatePayload
from weight_sync.digest import DigestError, check_digests, digest, wire_bytes
from weight_sync.gloo_trainer import GlooTrainerInitInfo, GlooTrainerWeightTransferEngine
from weight_sync.group import GlooGroup, TransferGroupError, free_port, receive_buckets
from weight_sync.manifest import Manifest
from weight_sync.source import DeepSpeedSource

BUCKET_BYTES = 100


class Receiver:
    """A client whose one worker keeps what it receives. ``defect`` changes it first; ``error`` is raised on joining."""

    def __init__(self, defect: Any = None, error: Exception | None = None) -> None:
        self.version: int | None = None
        self.defect, self.error = defect, error
        self.announced: list[dict[str, Any]] = []
        self.received: dict[str, torch.Tensor] = {}
        self.finished = 0
        self.group: GlooGroup | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        address, port = init_info["master_address"], init_info["master_port"]
        self.group = GlooGroup(address, port, init_info["rank_offset"], init_info["world_size"], 30.0)
        if self.error is not None:
            raise self.error

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: UpdatePayload) -> None:
        assert isinstance(update_info, dict)
        self.announced.append(update_info)
        manifest = Manifest.from_wire(update_info["names"], update_info["dtype_names"], update_info["shapes"])
        buckets = plan_buckets(manifest, BUCKET_BYTES)
        sizes = [sum(entry.bytes for entry in bucket) for bucket in buckets]
        hashed = update_info.get("hashed", False)
        stream = receive_buckets(self.group, sizes + [wire_bytes(len(manifest.entries))] * hashed)
        for bucket in buckets:
            self.received |= unpack(next(stream), bucket)
        if self.defect is not None:
            self.defect(self.received)
        if hashed:
            digests = [digest(self.received[name]) for name in manifest.names]
            check_digests(manifest.names, digests, next(stream))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.finished += 1

    def abandon(self, reason: str) -> None: ...


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(5)))


def connected(receiver: Receiver, world_size: int = 2, timeout: float = 30.0) -> GlooTrainerWeightTransferEngine:
    info = GlooTrainerInitInfo(
        master_address="127.0.0.1",
        master_port=free_port("127.0.0.1"),
        world_size=world_size,
        packed_buffer_size_bytes=BUCKET_BYTES,
        timeout_seconds=timeout,
    )
    source = DeepSpeedSource(model(), bucket_bytes=BUCKET_BYTES)
    return GlooTrainerWeightTransferEngine.trainer_init(info, client=receiver, source=source)


@pytest.mark.parametrize("hashed", [False, True])
def test_every_tensor_arrives_and_digests_follow_only_where_they_are_asked_for(hashed):
    receiver = Receiver()
    sender = connected(receiver)
    for _ in range(2):
        sender.hashed = hashed
        sender.send_weights()
    assert receiver.finished == 2
    assert [info.get("hashed", False) for info in receiver.announced] == [hashed] * 2
    for name, tensor in model().state_dict().items():
        assert torch.equal(receiver.received[name], tensor)
    sender.shutdown()


def test_what_a_receiver_finds_damaged_fails_the_sender_by_name_and_ends_the_group():
    def damage(received: dict[str, torch.Tensor]) -> None:
        received["3.weight"][1, 2] += 1e-6

    receiver = Receiver(damage)
    sender = connected(receiver)
    sender.hashed = True
    with pytest.raises(DigestError, match=r"1 of 10 tensors .*: 3\.weight$"):
        sender.send_weights()
    assert receiver.finished == 0
    with pytest.raises(TransferGroupError, match="connect again"):
        sender.send_weights()


def test_a_group_whose_other_side_reports_an_error_is_left_at_once_even_while_the_error_is_looked_at():
    receiver = Receiver(error=LookupError("the engine has no worker"))
    with pytest.raises(LookupError) as held:
        connected(receiver)
    assert receiver.group is not None
    with pytest.raises(TransferGroupError, match=LEFT):  # not: timed out
        list(receive_buckets(receiver.group, [8]))
    assert held.value is not None
    receiver.group.close()


def test_a_member_that_never_joins_is_what_the_error_names_and_not_those_that_waited_for_it(monkeypatch):
    always_come(monkeypatch, 1)
    with pytest.raises(TransferGroupError, match=r"rank 0 could not join .* of 3 .*: rank 2 did not come"):
        connected(Receiver(), world_size=3, timeout=3.0)
