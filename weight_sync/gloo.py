"""The worker's side of weight transfer over gloo: the interface and the packed buckets of vLLM's ``nccl`` engine.

Unlike vLLM's own, it checks that an update is whole: what is announced, what arrives, and whether it fills the model.
Any failure on either side ends the group, so that the other side fails at once instead of waiting.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.packed_tensor import (
    DEFAULT_PACKED_BUFFER_SIZE_BYTES,
    DEFAULT_PACKED_NUM_BUFFERS,
)

from weight_sync.background import in_thread
from weight_sync.delta import Patch
from weight_sync.group import GlooGroup, TransferGroupError
from weight_sync.manifest import Manifest, ManifestError, abridged
from weight_sync.ranks import worker_rank
from weight_sync.reload import IncompleteUpdateError, held_dtypes
from weight_sync.staging import Replacement, StagingDevice, replacement
from weight_sync.stream import Load, receive_tensors

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """What a worker is told to join the group: vLLM's ``nccl`` fields, and what :class:`GlooTrainerInitInfo` adds.

    ``packed_num_buffers`` is taken so that what fits ``nccl`` fits here: gloo fills one buffer at a time.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_seconds: float
    staging: StagingDevice | None = None
    deltas: bool = False
    packed: bool = True
    packed_buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES
    packed_num_buffers: int = DEFAULT_PACKED_NUM_BUFFERS

    def __post_init__(self) -> None:
        if not self.packed:
            raise ValueError("the gloo transfer engine sends packed buckets only: leave packed=True")


@dataclass(kw_only=True)
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The announcement of one update of the whole model, in the order of travel.

    ``hashed``: digests follow the last bucket. With ``base`` only what changed since that version travels, as
    :func:`weight_sync.delta.delta_manifest` lists it for the numbers of elements in ``changed``.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    version: int | None = None
    hashed: bool = False
    base: int | None = None
    changed: list[int] | None = None


@dataclass
class Shadow:
    """What the model holds, in checkpoint format, as the sender knows it: what a delta is written into."""

    version: int | None
    tensors: dict[str, torch.Tensor]


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """One update is one ``update_weights`` call that carries the whole model.

    An announcement that differs from the first accepted one is refused before the model is touched. A failure while
    loading is raised after the whole stream has been received, so that the sender is not left waiting.

    With staging, ``update_weights`` returns at once: the update arrives in a thread, and :meth:`staged` tells of it.
    The model is as it was until ``finish_weight_update``.
    """

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: GlooGroup | None = None
        self._bucket_bytes = DEFAULT_PACKED_BUFFER_SIZE_BYTES
        self._staging: StagingDevice | None = None
        self._accepted: Manifest | None = None
        self._announced: Manifest | None = None
        self._replacement: Replacement | None = None
        """From the announcement of an update until it is complete or given up."""
        self._arrival: Future[None] | None = None
        """Of a staged update: resolved when it has arrived."""
        self._received: Manifest | None = None
        """What has arrived, of an update that is to be finished."""
        self._deltas = False
        self._shadow: Shadow | None = None
        """Of the model as it is; only where deltas may come, and none from the start of an update until its end."""
        self._next_shadow: Shadow | None = None
        """Of the update that is under way."""

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the sender's group, leaving any older one. Raises ``TransferGroupError`` after the deadline."""
        self._abandon()
        self.shutdown()
        rank = worker_rank(
            rank_offset=init_info.rank_offset,
            data_parallel_index=self.parallel_config.data_parallel_index,
            workers_per_replica=self.parallel_config.world_size,
            rank_in_replica=self.parallel_config.rank,
        )
        self._bucket_bytes = init_info.packed_buffer_size_bytes
        self._staging = init_info.staging
        self._deltas, self._shadow = init_info.deltas, None
        self._group = GlooGroup(
            init_info.master_address, init_info.master_port, rank, init_info.world_size, init_info.timeout_seconds
        )

    def parse_update_info(self, update_dict: dict[str, Any]) -> GlooUpdateInfo:
        """The typed announcement. What is none gives up the running update: ``EngineClient.abandon`` sends such."""
        try:
            return super().parse_update_info(update_dict)
        except ValueError:
            self._abandon()
            raise

    def start_weight_update(self) -> None:
        """Begin an update. The model is left alone until an announcement has been accepted."""
        self._abandon()

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Check the announcement, receive every bucket and load it, then check that the model is filled.

        Raises ``ManifestError`` (announcement refused, model untouched), ``LoadError``, ``DigestError`` (a tensor did
        not arrive as it was sent), ``IncompleteUpdateError`` or ``TransferGroupError``; with staging only the first,
        and :meth:`staged` the others.
        """
        try:
            manifest = self._announced = self._checked(update_info)
            assert self._group is not None
            shadow = self._next_shadow = self._shadow_for(update_info)
            self._replacement = replacement(self.model, self.model_config, self._staging)
            receive = partial(self._receive, self._replacement, self._group, manifest, update_info, shadow)
            if self._staging is not None:
                self._arrival = in_thread(receive, "weight-staging")
                return
            receive()
            self._received = manifest
        except BaseException:
            self._abandon()
            self.shutdown()
            raise

    def staged(self) -> bool:
        """Whether the staged update has arrived whole and waits to be finished. Raises what kept it from that."""
        if self._arrival is None:
            raise IncompleteUpdateError("no staged update is under way")
        if not self._arrival.done():
            return False
        self._arrival.result()
        self._received = self._announced
        return True

    def finish_weight_update(self) -> None:
        """Complete the update. Raises :class:`IncompleteUpdateError` if no whole one has arrived since the start."""
        if self._replacement is None or self._received is None:
            raise IncompleteUpdateError("finish_weight_update was called, but no complete update has arrived")
        self._replacement.finish()
        self._accepted, self._shadow = self._received, self._next_shadow
        self._replacement = self._arrival = self._received = self._next_shadow = None

    def shutdown(self) -> None:
        """Leave the transfer group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _checked(self, update_info: GlooUpdateInfo) -> Manifest:
        if self._group is None:
            raise TransferGroupError("this worker is in no transfer group: connect before a push")
        if self._replacement is not None:
            raise ManifestError("a second announcement in one update; an update is announced whole")
        manifest = Manifest.from_wire(update_info.names, update_info.dtype_names, update_info.shapes)
        if not manifest.entries:
            raise ManifestError("the announced update is empty")
        if lines := manifest.foreign(held := held_dtypes(self.model, self.model_config)):
            # vLLM would convert them without a word: rounded, or in a precision that the learner does not compute in.
            raise ManifestError(
                f"the engine holds weights in {', '.join(sorted(map(str, held)))}, and takes none in another dtype: "
                f"{abridged(lines)}"
            )
        if self._accepted is not None and (lines := self._accepted.difference(manifest)):
            raise ManifestError(f"the announced update differs from the first accepted one: {abridged(lines)}")
        return manifest

    def _shadow_for(self, update_info: GlooUpdateInfo) -> Shadow | None:
        """What the update is written into: what a delta is based on, something empty, or nothing.

        Raises ``ManifestError`` for a delta from something else than the model holds.
        """
        shadow, self._shadow = self._shadow, None
        if update_info.base is None:
            return Shadow(update_info.version, {}) if self._deltas else None
        if shadow is None or shadow.version != update_info.base:
            held = "no version" if shadow is None else f"version {shadow.version}"
            raise ManifestError(f"a delta from version {update_info.base} was announced, but {held} is held here")
        shadow.version = update_info.version
        return shadow

    def _receive(
        self, into: Replacement, group: GlooGroup, manifest: Manifest, info: GlooUpdateInfo, shadow: Shadow | None
    ) -> None:
        """Receive and load everything; with staging in a thread, so it changes nothing of this object."""
        # Gradients and the current configuration are matters of a thread, and of whoever came last.
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            try:
                if info.base is not None:
                    assert shadow is not None
                    patch = Patch(shadow.tensors, manifest, info.changed or ())
                    receive_tensors(group, patch.manifest, self._bucket_bytes, info.hashed, patch.load)
                    into.begin()
                    into.load(shadow.tensors.items())
                else:
                    into.begin()
                    load = into.load if shadow is None else _both(shadow.tensors.update, into.load)
                    receive_tensors(group, manifest, self._bucket_bytes, info.hashed, load)
                into.loaded()
            except BaseException:
                into.abandon()
                group.close()  # the sender fails at once and asks for the reason
                raise

    def _abandon(self) -> None:
        """Give up an unfinished update, so that nothing of it is counted in the next one."""
        replaced, arrival = self._replacement, self._arrival
        self._replacement = self._arrival = self._received = self._next_shadow = None
        if replaced is None:
            return
        logger.warning("an unfinished weight update is given up; only a complete one makes this engine fit to serve")
        if arrival is None or arrival.done():
            replaced.abandon()
        else:
            self.shutdown()  # its thread fails and gives the replacement up


def _both(keep: Load, load: Load) -> Load:
    def take(tensors: list[tuple[str, torch.Tensor]]) -> None:
        keep(tensors)
        load(tensors)

    return take
