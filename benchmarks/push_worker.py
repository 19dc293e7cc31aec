"""What ``benchmarks.push_engine`` runs inside vLLM's worker: the receiving end of a measurement.

vLLM calls each function with the worker first. Times are of ``time.monotonic``, which all processes of a machine share.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from weight_sync.background import in_thread
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
    _throw_away(group, sizes)
    return time.monotonic()


def reload_alone(worker: Any, announcement: dict[str, list[Any]], bucket_bytes: int, beside: bool) -> float:
    """Receive a whole update, and only then load it, as vLLM's own engines do. Seconds of the loading alone.

    ``beside``: while it is loaded the same bytes arrive a second time, and are thrown away; seconds until both is done.
    A complete push has to follow: vLLM leaves a tied output head stale.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    engine, group = worker.weight_transfer_engine, _group(worker)
    buckets = plan_buckets(Manifest.from_wire(**announcement), bucket_bytes)
    sizes = [sum(entry.bytes for entry in bucket) for bucket in buckets]
    stream = receive_buckets(group, sizes)
    tensors = [pair for bucket, packed in zip(buckets, stream, strict=True) for pair in unpack(packed, bucket)]
    with torch.no_grad(), set_current_vllm_config(engine.vllm_config):
        started = time.monotonic()
        arriving = in_thread(lambda: _throw_away(group, sizes), "arriving") if beside else None
        initialize_layerwise_reload(engine.model)
        engine.model.load_weights(iter(tensors))
        finalize_layerwise_reload(engine.model, engine.model_config)
        if arriving is not None:
            arriving.result()
        return time.monotonic() - started


def pack_head(worker: Any) -> float:
    """Seconds in which a push brings a tied output head up to date, which vLLM's reload leaves stale."""
    from weight_sync.reload import pack_tied_heads

    started = time.monotonic()
    with torch.no_grad():
        pack_tied_heads(worker.weight_transfer_engine.model)
    return time.monotonic() - started


def _throw_away(group: GlooGroup, sizes: list[int]) -> None:
    for _ in receive_buckets(group, sizes):
        pass


def _group(worker: Any) -> GlooGroup:
    group: GlooGroup | None = worker.weight_transfer_engine._group
    assert group is not None, "a measurement needs the group of a push before it"
    return group
