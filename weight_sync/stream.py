"""The receiving end of one update's stream: buckets become named tensors, hashed where the sender does so too."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weight_sync.buckets import plan_buckets, unpack
from weight_sync.digest import check_digests, digest, wire_bytes
from weight_sync.group import GlooGroup, receive_buckets
from weight_sync.manifest import Manifest

Load = Callable[[list[tuple[str, torch.Tensor]]], None]
"""Takes the tensors of a bucket. They are views of memory that nobody writes to again."""


def receive_tensors(group: GlooGroup, manifest: Manifest, bucket_bytes: int, hashed: bool, load: Load) -> None:
    """Receive the whole stream that ``manifest`` announces, whatever ``load`` does; then raise what it raised first.

    A bucket is hashed and loaded while the next one arrives. Raises ``DigestError`` naming the tensors that are not
    what was sent, and ``TransferGroupError``.
    """
    failure: Exception | None = None
    digests: list[int] = []
    buckets = plan_buckets(manifest, bucket_bytes)
    sizes = [sum(entry.bytes for entry in bucket) for bucket in buckets]
    hashed = hashed and bool(manifest.entries)
    stream = receive_buckets(group, [*sizes, wire_bytes(len(manifest.entries))] if hashed else sizes)
    for bucket in buckets:
        packed = next(stream)
        if failure is not None:
            continue
        try:
            tensors = unpack(packed, bucket)
            if hashed:
                digests += [digest(tensor) for _, tensor in tensors]
            load(tensors)
        except Exception as error:
            failure = error
    sent = next(stream) if hashed else None
    if failure is not None:
        raise failure
    if sent is not None:
        check_digests(manifest.names, digests, sent)
