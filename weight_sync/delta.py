"""What of a tensor has changed, bit by bit, and how that travels: positions and new values.

Values and not differences, so that an engine ends with the very bytes of a dense push. A position is the number of a
block of 65,536 elements and an offset in it: for every block travels how many changed (int32), for every change the
offset (16 bits). A changed bfloat16 element so takes 4 bytes instead of the 6 that 32-bit positions take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from weight_sync.manifest import Manifest, ManifestEntry, ManifestError

BLOCK = 1 << 16
"""Elements of a block: as many as there are 16-bit offsets."""

PARTS = ("counts", "offsets", "values")
"""What travels of a tensor, in this order."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width: two are equal exactly when all their bits are."""
    return tensor.view(_BITS[tensor.element_size()])


def changed_positions(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Ascending positions, int64 ``[changes]``, at which two flat tensors of one dtype and length differ in any bit.

    Unlike a comparison of numbers it tells -0.0 from 0.0, and a NaN from another NaN, not from itself.
    """
    return (bits(before) != bits(after)).nonzero().flatten()


def encode_positions(positions: torch.Tensor, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending positions, int64, in a tensor of ``elements``, as counts (int32 ``[blocks]``) and offsets (int16)."""
    counts = torch.bincount(positions // BLOCK, minlength=_blocks(elements))
    return counts.to(torch.int32), (positions % BLOCK - BLOCK // 2).to(torch.int16)


def decode_positions(counts: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The positions that :func:`encode_positions` took. Raises ``ManifestError`` if the two do not belong together."""
    if bool((counts < 0).any()) or int(counts.sum()) != len(offsets):
        raise ManifestError(f"the blocks of a delta count {int(counts.sum())} changes, but it has {len(offsets)}")
    blocks = torch.arange(len(counts), device=counts.device).repeat_interleave(counts.long())
    return blocks * BLOCK + (offsets.long() + BLOCK // 2)


def delta_manifest(whole: Manifest, changed: Sequence[int]) -> Manifest:
    """What travels when so many elements of each tensor of ``whole`` have changed; of unchanged tensors nothing.

    Raises :class:`ManifestError` if the counts do not fit the tensors.
    """
    if len(changed) != len(whole.entries):
        raise ManifestError(f"{len(changed)} counts of changes for {len(whole.entries)} tensors")
    entries: list[ManifestEntry] = []
    for entry, count in zip(whole.entries, changed, strict=True):
        elements = prod(entry.shape)
        if not 0 <= count <= elements:
            raise ManifestError(f"{count} changes of {entry.name!r}, which has {elements} elements")
        if count:
            entries += [
                ManifestEntry(f"{entry.name} {PARTS[0]}", "int32", (_blocks(elements),)),
                ManifestEntry(f"{entry.name} {PARTS[1]}", "int16", (count,)),
                ManifestEntry(f"{entry.name} {PARTS[2]}", entry.dtype, (count,)),
            ]
    return Manifest(tuple(entries))


@dataclass(frozen=True, slots=True)
class Delta:
    """A push of what changed since version ``base``: ``changed`` elements of each tensor of ``whole``."""

    base: int
    whole: Manifest
    changed: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    """Counts, offsets and values of every tensor that changed, as :attr:`manifest` lists them."""

    @property
    def manifest(self) -> Manifest:
        """What travels."""
        return delta_manifest(self.whole, self.changed)

    def patches(self) -> Iterator[tuple[ManifestEntry, torch.Tensor, torch.Tensor]]:
        """Of every tensor that changed, its ascending positions, int64, and the values there."""
        parts = iter(self.tensors)
        for entry, count in zip(self.whole.entries, self.changed, strict=True):
            if count:
                counts, offsets, values = next(parts), next(parts), next(parts)
                yield entry, decode_positions(counts, offsets), values

    @property
    def patch_bytes(self) -> int | None:
        """What travels over vLLM's sparse engine, with 32-bit positions; ``None`` if it cannot take this delta.

        It takes none without a change, and marks what is unchanged by NaN, so it changes floating-point tensors only.
        """
        changed = [(entry, count) for entry, count in zip(self.whole.entries, self.changed, strict=True) if count]
        if not changed or any(
            not entry.torch_dtype.is_floating_point or prod(entry.shape) > torch.iinfo(torch.int32).max
            for entry, _ in changed
        ):
            return None
        return sum(count * (torch.int32.itemsize + entry.torch_dtype.itemsize) for entry, count in changed)


def make_delta(base: int, whole: Manifest, changes: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Delta:
    """The delta of ``changes``: of every tensor its ascending positions, int64, and the new values there."""
    tensors: list[torch.Tensor] = []
    for entry, (positions, values) in zip(whole.entries, changes, strict=True):
        if len(positions):
            tensors += [*encode_positions(positions, prod(entry.shape)), values]
    return Delta(base, whole, tuple(len(positions) for positions, _ in changes), tuple(tensors))


class Patch:
    """The receiving end of a delta: writes it into ``tensors``, by name, as its parts arrive in any buckets."""

    def __init__(self, tensors: dict[str, torch.Tensor], whole: Manifest, changed: Sequence[int]) -> None:
        self.manifest = delta_manifest(whole, changed)
        self._tensors = tensors
        self._parts: dict[str, list[torch.Tensor]] = {}

    def load(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Take some parts, in the order of the manifest. Raises ``ManifestError`` for positions outside of a tensor."""
        for part, tensor in pairs:
            name = part.rpartition(" ")[0]
            parts = self._parts.setdefault(name, [])
            parts.append(tensor)
            if len(parts) == len(PARTS):
                counts, offsets, values = self._parts.pop(name)
                self._write(name, decode_positions(counts, offsets), values)

    def _write(self, name: str, positions: torch.Tensor, values: torch.Tensor) -> None:
        flat = self._tensors[name].view(-1)
        if int(positions.max()) >= len(flat):
            raise ManifestError(f"a delta changes element {int(positions.max())} of {name!r}, which has {len(flat)}")
        bits(flat).index_copy_(0, positions.to(flat.device), bits(values).to(flat.device))


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)
