"""A low-rank adapter as peft saves it: the form in which it goes to engines, whose vLLM loads adapters from files."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass

from weight_sync.lora import PEFT_PREFIX
from weight_sync.manifest import Manifest
from weight_sync.source import DeepSpeedSource


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The two files, and the CRC-32 of the second. Picklable; a few megabytes to a few hundred."""

    config: str
    """``adapter_config.json``."""
    weights: bytes
    """``adapter_model.safetensors``."""
    checksum: int


def files_of(adapter: DeepSpeedSource) -> AdapterFiles:
    """The files of the adapter that a source reads, gathered on the CPU of this process."""
    from safetensors.torch import save

    weights = save({PEFT_PREFIX + name: tensor.cpu() for name, tensor in adapter})
    return AdapterFiles(json.dumps(adapter.peft_config()), weights, zlib.crc32(weights))


def manifest_of(files: AdapterFiles) -> Manifest:
    """The tensors in files that arrived. Raises ``ValueError`` where they are not as they were sent."""
    from safetensors.torch import load

    if zlib.crc32(files.weights) != files.checksum:
        raise ValueError("the adapter did not arrive as it was sent: its file has another CRC-32")
    tensors = load(files.weights)
    return Manifest.from_wire(
        [name.removeprefix(PEFT_PREFIX) for name in tensors],
        [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        [list(tensor.shape) for tensor in tensors.values()],
    )
