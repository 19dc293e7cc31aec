"""A gloo process group between the sender and the engines' workers, outside torch's registered groups.

Every wait has a deadline: the rendezvous, the connection of the group, and each broadcast.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore, Work

from weight_sync.scratch import keep, scratch

POLL_SECONDS = 0.0001
"""Between two looks at a broadcast: a bucket takes a few milliseconds, and the next one waits for the look."""
HELD_BUCKETS = 4
"""Of a receiver, at a time: one arrives, one has arrived, one is loaded, and one more is held by layers that wait for
their other parts."""
ARRIVAL_SHARE = 0.8
"""Of the deadline: what members may take to arrive. So rank 0 can name those that have not before others give up."""


class TransferGroupError(RuntimeError):
    """The transfer group could not be built, or a collective failed. The group must not be used again.

    ``absent`` are the ranks that never came, where that is why.
    """

    def __init__(self, message: str, absent: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.absent = tuple(absent)


@dataclass(eq=False)
class Transfer:
    """A broadcast on its way. ``work`` is ``None`` once it is waited for, or its group closed."""

    tensor: torch.Tensor
    work: Work | None


class GlooGroup:
    """Membership of one process in a transfer group. Rank 0 listens at ``host:port`` and sends; the others receive.

    ``timeout`` seconds bound building the group, and each collective in it. Raises :class:`TransferGroupError` naming
    the address when the group cannot be built: a busy port, a wrong address, a member that never came.
    """

    def __init__(self, host: str, port: int, rank: int, world_size: int, timeout: float) -> None:
        self.timeout = timeout
        self.rank = rank
        self._travelling: list[Transfer] = []
        limit = timedelta(seconds=timeout)
        gloo: Any = ProcessGroupGloo  # torch ships no types for its options
        try:
            store: Any = TCPStore(host, port, world_size, rank == 0, limit, wait_for_workers=False)
            if absent := _absent(store, rank, world_size, timeout):
                raise TransferGroupError(f"rank {', '.join(map(str, absent))} did not come", absent)
            options = gloo._Options()
            options._timeout = limit
            # Bind to the interface that leads to the sender: by default gloo resolves the host's own name, which may
            # not resolve, or to an address that the sender cannot reach.
            options._devices = [gloo.create_device(hostname=_own_address(host))]
            self._group: Any = gloo(store, rank, world_size, options)
            self._store: TCPStore | None = store
        except Exception as error:
            store = None  # the error's traceback would keep it, and with it the port, for as long as somebody looks
            reason, *_ = str(error).splitlines() or [type(error).__name__]  # without torch's stack of C++
            raise TransferGroupError(
                f"rank {rank} could not join the transfer group of {world_size} at {host}:{port} "
                f"within {timeout:g} s: {reason}",
                absent=getattr(error, "absent", ()),
            ) from error

    def broadcast(self, tensor: torch.Tensor) -> Transfer:
        """Start a broadcast from rank 0. The tensor must not be touched until :meth:`wait` returns."""
        if self._group is None:
            raise TransferGroupError("the transfer group is closed; connect again before the next push")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        transfer = Transfer(tensor, self._group.broadcast([tensor], options))
        self._travelling.append(transfer)
        return transfer

    def wait(self, transfer: Transfer, check: Callable[[], None] = lambda: None) -> None:
        """Wait for a broadcast. ``check`` is called all the while and may raise to give up early.

        Raises :class:`TransferGroupError` when a peer left or the deadline passed.
        """
        deadline = time.monotonic() + self.timeout
        # Another thread may close the group meanwhile, which takes the handle away.
        while (work := transfer.work) is not None and not work.is_completed():
            check()
            if time.monotonic() > deadline:
                raise TransferGroupError(f"a peer did not take part in a broadcast for {self.timeout:g} s")
            time.sleep(POLL_SECONDS)
        if work is None:
            raise TransferGroupError("the transfer group was closed during a broadcast")
        try:
            work.wait()
        except RuntimeError as error:
            raise TransferGroupError(f"a peer left the transfer group or fell silent: {error}") from error
        transfer.work = None
        if transfer in self._travelling:
            self._travelling.remove(transfer)

    def close(self) -> None:
        """Leave the group; peers that wait for this process fail at once. Safe to call twice."""
        if self._group is None:
            return
        last_reference = [self._group]
        self._group = self._store = None
        # A collective's handle keeps the connections open, and an error's traceback keeps the handle: peers would go on
        # waiting until their deadline for as long as somebody looks at the error.
        for transfer in self._travelling:
            transfer.work = None
        self._travelling.clear()
        last_reference[0].abort()
        # The destructor waits for collectives that a silent peer keeps pending, up to their timeout: not in our way.
        threading.Thread(target=last_reference.clear, name="gloo-release", daemon=True).start()


def _absent(store: TCPStore, rank: int, world_size: int, timeout: float) -> list[int]:
    """Say that ``rank`` is there. To rank 0, which waits for all others: those that have not come."""
    store.set(f"arrived/{rank}", "")
    if rank != 0:
        return []
    others = {other: f"arrived/{other}" for other in range(1, world_size)}
    try:
        store.wait(list(others.values()), timedelta(seconds=ARRIVAL_SHARE * timeout))
    except RuntimeError:  # not all of them, by then
        return [other for other, key in others.items() if not store.check([key])]
    return []


def send_buckets(group: GlooGroup, buckets: Iterable[torch.Tensor], check: Callable[[], None] = lambda: None) -> int:
    """Broadcast packed uint8 buckets from this process; returns how many. The next is packed while one travels."""
    count = 0
    pending: Transfer | None = None
    for bucket in buckets:
        started = group.broadcast(bucket)
        if pending is not None:
            group.wait(pending, check)
        pending = started
        count += 1
    if pending is not None:
        group.wait(pending, check)
    return count


def receive_buckets(group: GlooGroup, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
    """Receive packed buckets of the given sizes in bytes, each into memory of its own, uint8.

    The next is received while the caller works on one. Never reuses a buffer: what was unpacked from a bucket may be a
    view of it and lives on in vLLM's layer-wise reload.
    """
    keep(sizes, HELD_BUCKETS)
    pending: Transfer | None = None
    for size in sizes:
        started = group.broadcast(scratch(size))
        if pending is not None:
            group.wait(pending)
            yield pending.tensor
        pending = started
    if pending is not None:
        group.wait(pending)
        yield pending.tensor


def free_port(host: str) -> int:
    """A TCP port that nobody listens on at ``host`` right now.

    Raises :class:`TransferGroupError` when the name does not resolve or the address is none of this machine's.
    """
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise TransferGroupError(f"the sender cannot listen at {host!r} (weight_sync.address): {error}") from error


def _own_address(host: str) -> str:
    """This machine's address on the route to ``host``. Connecting a UDP socket sends nothing."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
