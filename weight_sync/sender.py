"""The learner's end of a push: checks the weights, builds the transfer group, sends."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

from weight_sync.background import in_thread
from weight_sync.client import Client, EngineClient
from weight_sync.delta import Delta
from weight_sync.gloo_trainer import GlooTrainerInitInfo, GlooTrainerWeightTransferEngine
from weight_sync.group import TransferGroupError, free_port
from weight_sync.ipc import HandleClient, buffer_bytes
from weight_sync.manifest import Manifest
from weight_sync.push import PushError
from weight_sync.ranks import engine_at, group_size
from weight_sync.snapshot import Snapshot
from weight_sync.source import DeepSpeedSource

logger = logging.getLogger(__name__)


class WeightSender:
    """Sends a learner's weights to the engines, over ``gloo``, or vLLM's ``nccl`` or ``ipc``.

    Lives in every learner rank: rank 0 sends, the others take part in the gathers, so ``prepare`` and ``send`` are
    called on all of them. ``bucket_bytes`` of packed tensors travel in one collective; ``timeout`` bounds, in seconds,
    each collective and each call to an engine. After a failure the group is gone: ``connect`` before the next push.
    ``staging``: workers hold what arrives, on their device or host, until the engine swaps it in; only over ``gloo``.
    ``deltas``: keep a copy of what the engines hold, of which each of ``ranks`` has a share, and send what changed.
    """

    def __init__(
        self,
        source: DeepSpeedSource,
        *,
        backend: str,
        rank: int = 0,
        bucket_bytes: int,
        timeout: float,
        staging: str | None = None,
        deltas: bool = False,
        ranks: int = 1,
    ) -> None:
        if backend not in ("gloo", "nccl", "ipc"):
            raise ValueError(f"no weight transfer backend {backend!r}: weight_sync.backend is gloo, nccl or ipc")
        self._source = source
        self._backend = backend
        self._rank = rank
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout
        self._staging = staging
        self._shares = (rank, ranks)
        self._snapshot = Snapshot(rank, ranks) if deltas else None
        self._delta: Delta | None = None
        """What the next push sends, unless that is everything."""
        self._client: Client | None = None
        self._engine: Any = None

    def connect(
        self, engine_handles: Sequence[Any], names: Sequence[str], workers: Sequence[int], address: str, port: int
    ) -> None:
        """Build the transfer group with the engines behind these Ray actor handles.

        ``names`` and ``workers`` hold each engine's name and how many of its processes take part. ``address`` is this
        node's, as the engines reach it; ``port`` 0 takes a free one. Raises :class:`PushError` (step ``connect`` or the
        engine call that failed).
        """
        client = EngineClient(engine_handles, workers_per_engine=workers, timeout=self._timeout, names=names)
        try:
            self.connect_client(client, address, port, group_size(workers))
        except PushError as error:
            if not isinstance(error.cause, TransferGroupError) or not error.cause.absent:
                raise
            engine = names[engine_at(error.cause.absent[0], workers)]
            raise PushError("connect", error.cause, engine) from error.cause

    def connect_client(self, client: Client, address: str, port: int, world_size: int) -> None:
        """As :meth:`connect`, over any client of the engines. ``world_size`` counts the sender and every worker."""
        if self._rank != 0:
            return
        self.close()
        try:
            self._engine = self._open(client, address, port, world_size)
        except PushError:
            raise
        except Exception as error:
            raise PushError("connect", error) from error
        self._client = client

    def prepare(self, base: int | None = None) -> Manifest:
        """What the engines will hold. Raises ``NonFiniteWeightError`` naming the tensors if it must not be sent.

        ``base`` is the version that every engine is known to hold: what changed since may be all that is sent. Without
        one everything is. Disturbs no engine. With ZeRO-3 each rank looks at its own partitions: the push may go on
        when all ranks return.
        """
        self._source.check_finite()
        manifest = self._source.manifest()
        self._delta = None
        if self._snapshot is not None and base is not None:
            self._delta = self._snapshot.find(base, manifest, self._source.shares(*self._shares))
        if self._delta is not None and not self._delta_bytes(self._delta) < manifest.total_bytes:
            self._delta = None
        return manifest

    def send(self, version: int, hashed: bool = False) -> int:
        """Move the weights into every engine, as ``version``; the bytes of tensors, or of a delta, that were sent.

        Returns when all engines hold and have completed them, or have staged them whole. ``hashed``: their workers
        compare a digest of every tensor. Over ``nccl`` and ``ipc`` there is none: vLLM's workers have no place for it.

        Raises :class:`PushError`. The group is then closed, and the engines must not serve before a complete push; with
        staging they still hold the old version and may.
        """
        delta, self._delta = self._delta, None
        manifest = self._source.manifest()
        if delta is None:
            self._source.begin_pass()
        try:
            if self._rank == 0:
                self._send(version, hashed, delta)
        except BaseException:
            if self._snapshot is not None:
                self._snapshot.version = None
            raise
        finally:
            # Other ranks wait in the gathers of this pass: it is completed even when sending failed half-way.
            self._source.finish_pass()
        if self._snapshot is not None and delta is None:
            self._snapshot.take(version, manifest, self._source.shares(*self._shares))
        elif self._snapshot is not None:
            self._snapshot.advance(version)
        return manifest.total_bytes if delta is None else int(self._delta_bytes(delta))

    def close(self) -> None:
        """Leave the transfer group. Safe to call twice."""
        engine, self._engine, self._client = self._engine, None, None
        if engine is not None:
            engine.shutdown()

    def _send(self, version: int, hashed: bool, delta: Delta | None) -> None:
        if self._engine is None or self._client is None:
            raise PushError("transfer", "there is no transfer group; connect before the push")
        client = self._client
        client.version = version
        if self._backend == "gloo":
            self._engine.hashed = hashed
        if self._snapshot is not None:
            self._engine.delta = delta
        try:
            self._bounded(self._engine.send_weights)
        except Exception as error:
            self.close()
            failure = error if isinstance(error, PushError) else PushError("transfer", error)
            client.abandon(failure.reason)
            raise failure from error

    def _delta_bytes(self, delta: Delta) -> float:
        """What of a delta travels over this backend; infinite if it cannot. The same on every rank."""
        if self._backend == "gloo":
            return delta.manifest.total_bytes
        return math.inf if delta.patch_bytes is None else delta.patch_bytes

    def _open(self, client: Client, address: str, port: int, world_size: int) -> Any:
        if self._backend == "ipc":
            return self._open_ipc(client)
        wire: dict[str, Any] = {
            "master_address": address,
            "master_port": port or free_port(address),
            "world_size": world_size,
            "packed_buffer_size_bytes": self._bucket_bytes,
        }
        if self._backend == "gloo":
            init_info = GlooTrainerInitInfo(
                **wire, timeout_seconds=self._timeout, staging=self._staging, deltas=self._snapshot is not None
            )
            return GlooTrainerWeightTransferEngine.trainer_init(init_info, client=client, source=self._source)

        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return self._open_of_vllm(NCCLTrainerInitInfo(**wire, rank=0), client)

    def _open_ipc(self, client: Client) -> Any:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        size = buffer_bytes(self._source.manifest(), self._bucket_bytes)
        init_info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=size)
        return self._open_of_vllm(init_info, HandleClient(client))

    def _open_of_vllm(self, init_info: Any, client: Any) -> Any:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        source: Any = self._source
        opened = self._bounded(
            lambda: WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=source)
        )
        if self._snapshot is None:
            return opened
        from weight_sync.nccl import NcclDeltaTrainer

        return NcclDeltaTrainer(opened, client)

    def _bounded(self, call: Any) -> Any:
        """Run a call of the trainer engine. gloo's have deadlines inside; vLLM's have none, so one is put around them.

        A call that outlives it stays behind in a daemon thread, blocked in a collective: replace this process then.
        """
        if self._backend == "gloo":
            return call()
        import torch

        device = torch.cuda.current_device()

        def run() -> Any:
            torch.cuda.set_device(device)  # the current device is a thread's own
            return call()

        ended = in_thread(run, f"{self._backend}-weight-transfer")
        if not wait([ended], timeout=self._timeout).done:
            raise TimeoutError(
                f"the {self._backend} transfer did not end within {self._timeout:g} s (weight_sync.timeout)"
            )
        return ended.result()
