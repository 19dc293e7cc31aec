"""What ``benchmarks.push_engine`` runs inside vLLM's worker: the receiving end of a measurement.

vLLM calls each function with the worker first. Times are of ``time.monotonic``, which all processes of a machine share.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from weight_sync.buckets import plan_buckets, unpack
from weight_sync.group import GlooGroup, receive_buckets
from weight_sync.manifest import Manifest


def meet(group: GlooGroup) -> float:
    """Wait for the other side, which does the same; the moment from which on both are ready."""
    group.wait(group.broadcast(torch.zeros(1, dtype=torch.uint8)))
    return time.monotonic()


def take_one(worker: Any, size: int) -> float:
    """Receive ``size`` bytes in one broadcast, into memory that is there already. When they had arrived."""
    group = _group(worker)
    memory = torch.ones(size, dtype=torch.uint8)
    meet(group)
    group.wait(group.broadcast(memory))
    return time.monotonic()


def take_buckets(worker: Any, sizes: list[int]) -> float:
    """Receive packed buckets as a push does, and throw them away. When the last had arrived."""
    group = _group(worker)
    meet(group)
    for _ in receive_buckets(group, sizes):
        pass
    return time.monotonic()


def reload_alone(worker: Any, announcement: dict[str, list[Any]], bucket_bytes: int) -> float:
    """Receive a whole update, and only then load it, as vLLM's own engines do. Seconds of the loading alone.

    A complete push has to follow: vLLM leaves a tied output head stale.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    engine = worker.weight_transfer_engine
    manifest = Manifest.from_wire(**announcement)
    buckets = plan_buckets(manifest, bucket_bytes)
    stream = receive_buckets(_group(worker), [sum(entry.bytes for entry in bucket) for bucket in buckets])
    tensors = [pair for bucket, packed in zip(buckets, stream, strict=True) for pair in unpack(packed, bucket)]
    with torch.no_grad(), set_current_vllm_config(engine.vllm_config):
        started = time.monotonic()
        initialize_layerwise_reload(engine.model)
        engine.model.load_weights(iter(tensors))
        finalize_layerwise_reload(engine.model, engine.model_config)
        return time.monotonic() - started


def _group(worker: Any) -> GlooGroup:
    group: GlooGroup | None = worker.weight_transfer_engine._group
    assert group is not None, "a measurement needs the group of a push before it"
    return group
