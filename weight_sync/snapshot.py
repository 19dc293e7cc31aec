"""The learner's copy of what the engines hold, in their dtype, to find what has changed since.

Every rank keeps a share: with ZeRO-3 its partition of each weight, else an equal slice of each. So the copy costs the
size of a push, divided by the ranks. Only positions and values of what changed come together on rank 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from weight_sync.delta import Delta, bits, changed_positions, delta_manifest, make_delta
from weight_sync.manifest import Manifest


class Share(NamedTuple):
    """The elements of a weight that one rank compares: flat, any dtype, the first of them at ``start`` of the whole."""

    start: int
    elements: torch.Tensor


class Snapshot:
    """A rank's shares of version :attr:`version`, which is ``None`` while they are of no use.

    ``rank`` of ``ranks``, which call the same methods together: what is found changed is gathered in collectives.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.version: int | None = None
        self._rank, self._ranks = rank, ranks
        self._held: list[torch.Tensor] = []
        self._changes: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Of this rank's shares, since the last :meth:`find`: positions in the share, and values."""

    def find(self, base: int, whole: Manifest, shares: Iterable[Share]) -> Delta | None:
        """What has changed since version ``base``; ``None`` on all ranks where a dense push is as good, or must be.

        That is when this is no copy of ``base``, and when the delta would be as large. ``shares`` are in the order of
        ``whole``. The delta is complete on rank 0; others get one without tensors.
        """
        self._changes = []
        if self.version is None or self.version != base:
            return None
        starts: list[int] = []
        for entry, held, share in zip(whole.entries, self._held, shares, strict=True):
            now = share.elements.to(entry.torch_dtype).flatten()
            positions = changed_positions(held, now)
            self._changes.append((positions, now[positions]))
            starts.append(share.start)
        counts = self._gathered_counts()
        changed = [sum(of_tensor) for of_tensor in zip(*counts, strict=True)]
        if delta_manifest(whole, changed).total_bytes >= whole.total_bytes:
            return None
        everyones = self._gathered_changes(whole, starts, counts)
        return make_delta(base, whole, everyones) if self._rank == 0 else Delta(base, whole, tuple(changed), ())

    def advance(self, version: int) -> None:
        """The engines were sent what the last :meth:`find` found: this is a copy of ``version`` now."""
        for held, (positions, values) in zip(self._held, self._changes, strict=True):
            bits(held).index_copy_(0, positions, bits(values))
        self._changes = []
        self.version = version

    def take(self, version: int, whole: Manifest, shares: Iterable[Share]) -> None:
        """The engines were sent everything: copy it."""
        self._changes = []
        if not self._held:
            self._held = [
                share.elements.detach().flatten().to(entry.torch_dtype, copy=True)
                for entry, share in zip(whole.entries, shares, strict=True)
            ]
        else:
            for held, share in zip(self._held, shares, strict=True):
                held.copy_(share.elements.detach().flatten())
        self.version = version

    def _gathered_counts(self) -> list[list[int]]:
        """Changes by rank and tensor, on every rank."""
        mine = torch.tensor([len(positions) for positions, _ in self._changes], dtype=torch.int64)
        if self._ranks == 1:
            return [mine.tolist()]
        mine = mine.to(self._device)
        counts = [torch.empty_like(mine) for _ in range(self._ranks)]
        dist.all_gather(counts, mine)
        return [count.tolist() for count in counts]

    def _gathered_changes(
        self, whole: Manifest, starts: Sequence[int], counts: Sequence[Sequence[int]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """On rank 0, of every tensor, ascending positions in the whole and values; elsewhere nothing. A collective."""
        mine = [(positions + start, values) for (positions, values), start in zip(self._changes, starts, strict=True)]
        if self._ranks == 1:
            return mine
        positions = self._gathered([positions for positions, _ in mine], torch.int64, [sum(count) for count in counts])
        sizes = [entry.torch_dtype.itemsize for entry in whole.entries]
        lengths = [[n * size for n, size in zip(count, sizes, strict=True)] for count in counts]
        payload = self._gathered(
            [bits(values).view(torch.uint8) for _, values in mine], torch.uint8, [sum(length) for length in lengths]
        )
        if self._rank != 0:
            return []
        # Shares follow one another by rank, so their positions, one behind the other, ascend.
        places = zip(*(chunk.split(list(count)) for chunk, count in zip(positions, counts, strict=True)), strict=True)
        values = zip(*(chunk.split(length) for chunk, length in zip(payload, lengths, strict=True)), strict=True)
        return [
            (torch.cat(places_of_ranks), torch.cat(values_of_ranks).view(entry.torch_dtype))
            for entry, places_of_ranks, values_of_ranks in zip(whole.entries, places, values, strict=True)
        ]

    def _gathered(
        self, tensors: Sequence[torch.Tensor], dtype: torch.dtype, lengths: Sequence[int]
    ) -> list[torch.Tensor]:
        """One flat tensor of each rank, of ``lengths``, on rank 0; elsewhere nothing. Shorter ones travel padded."""
        mine = torch.cat([tensor.to(dtype) for tensor in tensors])
        padded = torch.zeros(max(lengths), dtype=dtype, device=self._device)
        padded[: len(mine)] = mine
        gathered = [torch.empty_like(padded) for _ in lengths] if self._rank == 0 else None
        dist.gather(padded, gathered, dst=0)
        return [chunk[:length] for chunk, length in zip(gathered, lengths, strict=True)] if gathered else []

    @property
    def _device(self) -> torch.device:
        return self._held[0].device
