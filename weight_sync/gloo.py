"""The worker's side of weight transfer over gloo: the interface and the packed buckets of vLLM's ``nccl`` engine.

Unlike vLLM's own, it checks that an update is whole: what is announced, what arrives, and whether it fills the model.
Any failure on either side ends the group, so that the other side fails at once instead of waiting.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.packed_tensor import (
    DEFAULT_PACKED_BUFFER_SIZE_BYTES,
    DEFAULT_PACKED_NUM_BUFFERS,
)

from weight_sync.buckets import plan_buckets, unpack
from weight_sync.digest import check_digests, digest, wire_bytes
from weight_sync.group import GlooGroup, TransferGroupError, receive_buckets
from weight_sync.manifest import Manifest, ManifestError, abridged
from weight_sync.ranks import worker_rank
from weight_sync.reload import LayerwiseUpdate, held_dtypes

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """What a worker is told to join the group: vLLM's ``nccl`` fields, and the deadline of each collective.

    ``packed_num_buffers`` is taken so that what fits ``nccl`` fits here: gloo fills one buffer at a time.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_seconds: float
    packed: bool = True
    packed_buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES
    packed_num_buffers: int = DEFAULT_PACKED_NUM_BUFFERS

    def __post_init__(self) -> None:
        if not self.packed:
            raise ValueError("the gloo transfer engine sends packed buckets only: leave packed=True")


@dataclass(kw_only=True)
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The announcement of one whole update, in the order of travel. ``hashed``: digests follow the last bucket."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    hashed: bool = False


class IncompleteUpdateError(RuntimeError):
    """An update that is not whole: tensors announced or needed are missing. The engine must not serve."""


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """One update is one ``update_weights`` call that carries the whole model.

    An announcement that differs from the first accepted one is refused before the model is touched. A failure while
    loading is raised after the whole stream has been received, so that the sender is not left waiting.
    """

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: GlooGroup | None = None
        self._bucket_bytes = DEFAULT_PACKED_BUFFER_SIZE_BYTES
        self._accepted: Manifest | None = None
        self._update: LayerwiseUpdate | None = None
        self._received: Manifest | None = None

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
        not arrive as it was sent), ``IncompleteUpdateError`` or ``TransferGroupError``.
        """
        try:
            manifest = self._checked(update_info)
            self._update = LayerwiseUpdate(self.model, self.model_config)
            self._update.begin()
            self._receive_all(manifest, update_info.hashed)
            if missing := self._update.incomplete():
                raise IncompleteUpdateError(f"the update leaves weights of the model unfilled: {abridged(missing)}")
            self._received = manifest
        except BaseException:
            self._abandon()
            self.shutdown()
            raise

    def finish_weight_update(self) -> None:
        """Complete the reload. Raises :class:`IncompleteUpdateError` if no whole update has arrived since the start."""
        if self._update is None or self._received is None:
            raise IncompleteUpdateError("finish_weight_update was called, but no complete update has arrived")
        self._update.finish()
        self._accepted, self._received, self._update = self._received, None, None

    def shutdown(self) -> None:
        """Leave the transfer group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _checked(self, update_info: GlooUpdateInfo) -> Manifest:
        if self._group is None:
            raise TransferGroupError("this worker is in no transfer group: connect before a push")
        if self._update is not None:
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

    def _receive_all(self, manifest: Manifest, hashed: bool) -> None:
        """Receive the whole stream, whatever loading does; then raise what loading raised first.

        A bucket is hashed and loaded while the next one arrives.
        """
        assert self._group is not None
        assert self._update is not None
        failure: Exception | None = None
        digests: list[int] = []
        buckets = plan_buckets(manifest, self._bucket_bytes)
        sizes = [sum(entry.bytes for entry in bucket) for bucket in buckets]
        stream = receive_buckets(self._group, [*sizes, wire_bytes(len(manifest.entries))] if hashed else sizes)
        for bucket in buckets:
            packed = next(stream)
            if failure is not None:
                continue
            try:
                tensors = unpack(packed, bucket)
                if hashed:
                    digests += [digest(tensor) for _, tensor in tensors]
                self._update.load(tensors)
            except Exception as error:
                failure = error
        sent = next(stream) if hashed else None
        if failure is not None:
            raise failure
        if sent is not None:
            check_digests(manifest.names, digests, sent)

    def _abandon(self) -> None:
        """Give up an unfinished update, so that nothing of it is counted in the next one."""
        update, self._update, self._received = self._update, None, None
        if update is not None:
            logger.warning(
                "an unfinished weight update is given up; only a complete one makes this engine fit to serve"
            )
            update.abandon()
