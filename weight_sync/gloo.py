"""Weight transfer over gloo, for engines without NCCL: the interface and the packed buckets of vLLM's ``nccl`` engine.

Unlike vLLM's own, the receiving side checks that an update is whole: what is announced, what arrives, and whether it
fills the model. Any failure on either side ends the group, so that the other side fails at once instead of waiting.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self, TypeVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.packed_tensor import (
    DEFAULT_PACKED_BUFFER_SIZE_BYTES,
    DEFAULT_PACKED_NUM_BUFFERS,
)

from weight_sync.buckets import Bucket, pack, plan_buckets, unpack
from weight_sync.group import GlooGroup, TransferGroupError, receive_buckets, send_buckets
from weight_sync.manifest import Manifest, ManifestError, abridged
from weight_sync.ranks import worker_rank
from weight_sync.reload import LayerwiseUpdate

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
DEFAULT_TIMEOUT_SECONDS = 120.0


class IncompleteUpdateError(RuntimeError):
    """An update that is not whole: tensors announced or needed are missing. The engine must not serve."""


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


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """The worker's side. One update is one ``update_weights`` call that carries the whole model.

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

        Raises ``ManifestError`` (announcement refused, model untouched), ``LoadError``, ``IncompleteUpdateError`` or
        ``TransferGroupError``.
        """
        try:
            manifest = self._checked(update_info)
            self._update = LayerwiseUpdate(self.model, self.model_config)
            self._update.begin()
            self._receive_all(plan_buckets(manifest, self._bucket_bytes))
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
        if self._accepted is not None and (lines := self._accepted.difference(manifest)):
            raise ManifestError(f"the announced update differs from the first accepted one: {abridged(lines)}")
        return manifest

    def _receive_all(self, buckets: list[Bucket]) -> None:
        """Receive the whole stream, whatever loading does; then raise what loading raised first."""
        assert self._group is not None
        assert self._update is not None
        failure: Exception | None = None
        sizes = (sum(entry.bytes for entry in bucket) for bucket in buckets)
        for bucket, packed in zip(buckets, receive_buckets(self._group, sizes), strict=True):
            if failure is not None:
                continue
            try:
                self._update.load(unpack(packed, bucket))
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure

    def _abandon(self) -> None:
        """Give up an unfinished update, so that nothing of it is counted in the next one."""
        update, self._update, self._received = self._update, None, None
        if update is not None:
            logger.warning(
                "an unfinished weight update is given up; only a complete one makes this engine fit to serve"
            )
            update.abandon()


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


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """The trainer's side. Rank 0 sends; the other ranks only take part in the source's gathers.

    ``buckets_sent`` counts the collectives of the last push.
    """

    init_info_cls = GlooTrainerInitInfo

    def __init__(
        self,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource,
        init_info: GlooTrainerInitInfo,
        group: GlooGroup | None = None,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._bucket_bytes = init_info.packed_buffer_size_bytes
        self._timeout = init_info.timeout_seconds
        self._group = group
        self.buckets_sent = 0

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Build the group together with the workers. Raises the first side's error as soon as one side fails."""
        if source is None:
            raise ValueError("the gloo trainer engine needs a weight source")
        engine = cls(client=client, source=source, init_info=init_info)
        if engine.is_sender:
            wire = {key: value for key, value in asdict(init_info).items() if key != "rank"}
            payload = asdict(GlooInitInfo(rank_offset=1, **wire))
            joined = _in_thread(lambda: client.init_weight_transfer_engine(payload))
            opened = _in_thread(
                lambda: GlooGroup(
                    init_info.master_address, init_info.master_port, 0, init_info.world_size, init_info.timeout_seconds
                )
            )
            wait([joined, opened], return_when=FIRST_EXCEPTION)
            for side in (joined, opened):
                if side.done():
                    side.result()
            engine._group = opened.result()
        return engine

    def send_weights(self) -> None:
        """Announce, broadcast and finish one whole update. After any failure the group is closed for good."""
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        try:
            self._send()
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _send(self) -> None:
        if self._group is None:
            raise TransferGroupError("the transfer group is closed; connect again before the next push")
        manifest = Manifest.from_metadata(self.source.metadata())
        self.client.start_weight_update()
        # The workers receive inside update_weights, so the call runs beside the broadcasts.
        answered = _in_thread(lambda: self.client.update_weights(manifest.to_wire()))

        def check() -> None:
            if answered.done() and (error := answered.exception()) is not None:
                raise error

        try:
            self.buckets_sent = send_buckets(self._group, self._packed(manifest), check)
        except TransferGroupError:
            # A worker that refuses or fails leaves the group; its own words say more than "connection closed".
            wait([answered], timeout=min(5.0, self._timeout))
            check()
            raise
        answered.result(timeout=self._timeout)
        self.client.finish_weight_update()

    def _packed(self, manifest: Manifest) -> Iterator[torch.Tensor]:
        """The buckets of the plan, filled from the source; raises if the source departs from its own metadata."""
        stream = iter(self.source)
        for bucket in plan_buckets(manifest, self._bucket_bytes):
            tensors = []
            for entry in bucket:
                name, tensor = next(stream, (None, None))
                if tensor is None or (name, tensor.dtype, tuple(tensor.shape)) != (
                    entry.name,
                    entry.torch_dtype,
                    entry.shape,
                ):
                    found = "nothing" if tensor is None else f"{name} {tensor.dtype} {tuple(tensor.shape)}"
                    raise ManifestError(f"the weight source announced {entry} and then yielded {found}")
                tensors.append(tensor)
            yield pack(tensors)
        if (extra := next(stream, None)) is not None:
            raise ManifestError(f"the weight source yielded {extra[0]!r}, which it had not announced")


def _in_thread(call: Callable[[], Result]) -> Future[Result]:
    """Run ``call`` in a daemon thread. An executor's threads would be joined at exit, hanging on a silent peer."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weight-transfer", daemon=True).start()
    return future
