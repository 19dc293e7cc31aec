"""The trainer's side of weight transfer over gloo: the interface and the packed buckets of vLLM's ``nccl`` engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import asdict
from typing import Self, TypeVar

import torch
from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine, VLLMWeightSyncClient, WeightSource

from weight_sync.buckets import pack, plan_buckets
from weight_sync.gloo_wire import GlooInitInfo, GlooTrainerInitInfo
from weight_sync.group import GlooGroup, TransferGroupError, send_buckets
from weight_sync.manifest import Manifest, ManifestError

Result = TypeVar("Result")


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """Rank 0 sends; the other ranks only take part in the source's gathers.

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
        self._source = source
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
            for _ in self._source:
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
        manifest = Manifest.from_metadata(self._source.metadata())
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
        stream = iter(self._source)
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
