"""The trainer's side of weight transfer over gloo: the interface and the packed buckets of vLLM's ``nccl`` engine.

It has the methods of vLLM's ``TrainerWeightTransferEngine`` without being a subclass (a test compares the two): that
would import all of vLLM into the learner, ten seconds and more of CPU time at each start, for nothing but a base class.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch

from weight_sync.background import in_thread
from weight_sync.buckets import pack, plan_buckets
from weight_sync.client import Client
from weight_sync.delta import Delta
from weight_sync.digest import digest, to_wire
from weight_sync.group import GlooGroup, TransferGroupError, send_buckets
from weight_sync.manifest import Manifest, ManifestError
from weight_sync.scratch import keep
from weight_sync.source import DeepSpeedSource

REASON_SECONDS = 30.0
"""What an engine may take to say why a worker of it has left the group."""


@dataclass(frozen=True, kw_only=True)
class GlooTrainerInitInfo:
    """Where the sender listens, the size of the whole group, bytes of a bucket, seconds a collective may take.

    ``staging``: where the workers hold an update until it is swapped in, see :mod:`weight_sync.staging`. ``deltas``:
    whether they keep a copy of what they hold, to be changed by deltas.
    """

    master_address: str
    master_port: int
    world_size: int
    packed_buffer_size_bytes: int
    timeout_seconds: float
    staging: str | None = None
    deltas: bool = False


class GlooTrainerWeightTransferEngine:
    """The sender: rank 0 of the transfer group, whose other members are the engines' workers."""

    def __init__(self, *, client: Client, source: DeepSpeedSource, init_info: GlooTrainerInitInfo) -> None:
        self.client = client
        self.hashed = False
        """Whether the next updates carry the digests of what travels, for the workers to compare."""
        self.delta: Delta | None = None
        """What the next update sends in the place of everything."""
        self._bucket_bytes = init_info.packed_buffer_size_bytes
        self._timeout = init_info.timeout_seconds
        self._staging = init_info.staging
        self._source = source
        self._group: GlooGroup | None = None

    @classmethod
    def trainer_init(cls, init_info: GlooTrainerInitInfo, *, client: Client, source: DeepSpeedSource) -> Self:
        """Build the group together with the workers. Raises the first side's error as soon as one side fails."""
        engine = cls(client=client, source=source, init_info=init_info)
        payload = {"rank_offset": 1, **asdict(init_info)}
        joined = in_thread(lambda: client.init_weight_transfer_engine(payload))
        opened = in_thread(
            lambda: GlooGroup(
                init_info.master_address, init_info.master_port, 0, init_info.world_size, init_info.timeout_seconds
            )
        )
        sides: list[Future[Any]] = [joined, opened]
        wait(sides, return_when=FIRST_EXCEPTION)
        try:
            if opened.done() and isinstance(lacking := opened.exception(), TransferGroupError) and lacking.absent:
                raise lacking  # those that did come fail because of it, which says less
            for side in sides:
                if side.done():
                    side.result()
        except BaseException:
            opened.add_done_callback(_leave)  # it may have come about, or still do so
            raise
        engine._group = opened.result()
        return engine

    def send_weights(self) -> None:
        """Announce, broadcast and finish one whole update; a staged one is not finished but swapped in later.

        After any failure the group is closed for good.
        """
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
        manifest, announcement = self._announcement()
        self.client.start_weight_update()
        # The workers receive inside update_weights, so the call runs beside the broadcasts.
        answered = in_thread(lambda: self.client.update_weights(announcement))

        def check() -> None:
            if answered.done() and (error := answered.exception()) is not None:
                raise error

        try:
            send_buckets(self._group, self._packed(manifest), check)
        except TransferGroupError:
            # A worker that refuses or fails leaves the group; its own words say more than "connection closed".
            wait([answered], timeout=min(REASON_SECONDS, self._timeout))
            check()
            raise
        answered.result(timeout=self._timeout)
        if self._staging is None:
            self.client.finish_weight_update()

    def _announcement(self) -> tuple[Manifest, dict[str, Any]]:
        """What will travel, and what the workers are told: always the whole model, and what of it a delta changes."""
        whole = Manifest.from_metadata(self._source.metadata())
        announcement: dict[str, Any] = whole.to_wire() | {"version": self.client.version}
        if self.hashed:
            announcement["hashed"] = True
        if self.delta is None:
            return whole, announcement
        return self.delta.manifest, announcement | {"base": self.delta.base, "changed": list(self.delta.changed)}

    def _packed(self, manifest: Manifest) -> Iterator[torch.Tensor]:
        """The buckets of the plan, filled from source or delta, and behind them the digests if they are asked for.

        Raises if the source departs from its own metadata.
        """
        digests: list[int] = []
        stream = iter(self._source if self.delta is None else zip(manifest.names, self.delta.tensors, strict=True))
        buckets = plan_buckets(manifest, self._bucket_bytes)
        keep((sum(entry.bytes for entry in bucket) for bucket in buckets), at_once=2)  # one is packed, one travels
        for bucket in buckets:
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
            if self.hashed:
                digests += [digest(tensor) for tensor in tensors]  # while the bucket before this one travels
            yield pack(tensors)
            del tensors, tensor  # else they are there beside the next bucket while that is gathered
        if (extra := next(stream, None)) is not None:
            raise ManifestError(f"the weight source yielded {extra[0]!r}, which it had not announced")
        if digests:
            yield to_wire(digests)


def _leave(opened: Future[GlooGroup]) -> None:
    """Close a group that nobody will use: its port and its peers would wait for as long as the error is looked at."""
    if opened.exception() is None:
        opened.result().close()
