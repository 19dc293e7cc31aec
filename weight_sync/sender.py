"""The learner's end of a push: checks the weights, builds the transfer group, sends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from weight_sync.client import Client, EngineClient
from weight_sync.gloo_trainer import GlooTrainerInitInfo, GlooTrainerWeightTransferEngine
from weight_sync.group import TransferGroupError, free_port
from weight_sync.ipc import HandleClient, buffer_bytes
from weight_sync.manifest import Manifest
from weight_sync.push import PushError
from weight_sync.ranks import engine_at, group_size
from weight_sync.source import DeepSpeedSource

logger = logging.getLogger(__name__)


class WeightSender:
    """Sends a learner's weights to the engines, over ``gloo``, or vLLM's ``nccl`` or ``ipc``.

    Lives in every learner rank: rank 0 sends, the others take part in the gathers, so ``prepare`` and ``send`` are
    called on all of them. ``bucket_bytes`` of packed tensors travel in one collective; ``timeout`` bounds, in seconds,
    each collective and each call to an engine. After a failure the group is gone: ``connect`` before the next push.
    """

    def __init__(
        self, source: DeepSpeedSource, *, backend: str, rank: int = 0, bucket_bytes: int, timeout: float
    ) -> None:
        if backend not in ("gloo", "nccl", "ipc"):
            raise ValueError(f"no weight transfer backend {backend!r}: weight_sync.backend is gloo, nccl or ipc")
        self._source = source
        self._backend = backend
        self._rank = rank
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout
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

    def prepare(self) -> Manifest:
        """What the next push will send. Raises ``NonFiniteWeightError`` naming the tensors if it must not be sent.

        Disturbs no engine. With ZeRO-3 each rank looks at its own partitions: the push may go on when all ranks return.
        """
        self._source.check_finite()
        return self._source.manifest()

    def send(self, version: int, hashed: bool = False) -> int:
        """Move the weights into every engine, as ``version``; the bytes of tensors that were sent.

        Returns when all engines hold and have completed them. ``hashed``: their workers compare a digest of every
        tensor. Over ``nccl`` and ``ipc`` there is none, because vLLM's workers have no place for it.

        Raises :class:`PushError`. The group is then closed, and the engines must not serve before a complete push.
        """
        manifest = self._source.manifest()
        self._source.begin_pass()
        try:
            if self._rank == 0:
                self._send(version, hashed)
        finally:
            # Other ranks wait in the gathers of this pass: it is completed even when sending failed half-way.
            self._source.finish_pass()
        return manifest.total_bytes

    def close(self) -> None:
        """Leave the transfer group. Safe to call twice."""
        engine, self._engine, self._client = self._engine, None, None
        if engine is not None:
            engine.shutdown()

    def _send(self, version: int, hashed: bool) -> None:
        if self._engine is None or self._client is None:
            raise PushError("transfer", "there is no transfer group; connect before the push")
        client = self._client
        client.version = version
        if self._backend == "gloo":
            self._engine.hashed = hashed
        try:
            self._bounded(self._engine.send_weights)
        except Exception as error:
            self.close()
            failure = error if isinstance(error, PushError) else PushError("transfer", error)
            client.abandon(failure.reason)
            raise failure from error

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
            init_info = GlooTrainerInitInfo(**wire, timeout_seconds=self._timeout)
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
        return self._bounded(lambda: WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=source))

    def _bounded(self, call: Any) -> Any:
        """Run a call of the trainer engine. gloo's have deadlines inside; vLLM's have none, so one is put around them.

        A call that outlives it stays behind in a daemon thread, blocked in a collective: replace this process then.
        """
        if self._backend == "gloo":
            return call()
        import torch

        device = torch.cuda.current_device()
        outcome: dict[str, Any] = {}

        def run() -> None:
            torch.cuda.set_device(device)  # the current device is a thread's own
            try:
                outcome["result"] = call()
            except BaseException as error:
                outcome["error"] = error

        thread = threading.Thread(target=run, name=f"{self._backend}-weight-transfer", daemon=True)
        thread.start()
        thread.join(self._timeout)
        if thread.is_alive():
            raise TimeoutError(
                f"the {self._backend} transfer did not end within {self._timeout:g} s (weight_sync.timeout)"
            )
        if "error" in outcome:
            raise outcome["error"]
        return outcome.get("result")
