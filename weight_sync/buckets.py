"""Packed buckets: where the stream of tensors is cut, and how a bucket becomes tensors again.

The format is that of vLLM's packed broadcast engines: tensors in announced order, flattened to bytes and concatenated;
a bucket is closed by the tensor that takes it past the bucket size. Both sides cut by the manifest alone, so nothing
but data travels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weight_sync.manifest import Manifest, ManifestEntry
from weight_sync.scratch import scratch

Bucket = tuple[ManifestEntry, ...]


def plan_buckets(manifest: Manifest, bucket_bytes: int) -> list[Bucket]:
    """Cut the manifest into buckets: each holds tensors until their sum exceeds ``bucket_bytes``, the last the rest."""
    buckets: list[Bucket] = []
    current: list[ManifestEntry] = []
    size = 0
    for entry in manifest.entries:
        current.append(entry)
        size += entry.bytes
        if size > bucket_bytes:
            buckets.append(tuple(current))
            current, size = [], 0
    if current:
        buckets.append(tuple(current))
    return buckets


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors of any dtype and shape into one new uint8 tensor of their bytes, shape ``[bytes]``."""
    pieces = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    if any(piece.device.type != "cpu" for piece in pieces):
        return torch.cat(pieces)
    return torch.cat(pieces, out=scratch(sum(piece.numel() for piece in pieces)))


def unpack(packed: torch.Tensor, bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
    """The named tensors of a received bucket, ``packed`` uint8 of shape ``[bytes]``.

    They are views of ``packed`` wherever their offset allows it, so the caller must not write to it again.
    """
    pieces = packed.split([entry.bytes for entry in bucket])
    return [(entry.name, _typed(piece, entry)) for piece, entry in zip(pieces, bucket, strict=True)]


def _typed(piece: torch.Tensor, entry: ManifestEntry) -> torch.Tensor:
    dtype = entry.torch_dtype
    if piece.storage_offset() % dtype.itemsize:
        # After a tensor of a narrower dtype the offset may be no multiple of this one's size; torch then has no view.
        piece = piece.clone()
    return piece.view(dtype).view(entry.shape)
