"""What the two sides of the gloo transfer engine tell each other: the fields of vLLM's ``nccl``, and a deadline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import (
    DEFAULT_PACKED_BUFFER_SIZE_BYTES,
    DEFAULT_PACKED_NUM_BUFFERS,
)

DEFAULT_TIMEOUT_SECONDS = 120.0


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """What a worker is told to join the group: vLLM's ``nccl`` fields, and the deadline of each collective."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed: bool = True
    packed_buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES
    packed_num_buffers: int = DEFAULT_PACKED_NUM_BUFFERS
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        if not self.packed:
            raise ValueError("the gloo transfer engine sends packed buckets only: leave packed=True")


@dataclass(kw_only=True)
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The announcement of one whole update, in the order of travel."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """The trainer's side: where rank 0 listens, the size of the whole group, the wire parameters of ``nccl``."""

    backend: ClassVar[str] = "gloo"

    master_address: str
    master_port: int
    world_size: int
    packed: bool = True
    packed_buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES
    packed_num_buffers: int = DEFAULT_PACKED_NUM_BUFFERS
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
