"""What a push must deliver: names, dtypes and shapes of every tensor, and how two such lists differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class ManifestError(ValueError):
    """A list of tensors that cannot be a push: a duplicate name, an unknown dtype, columns of unequal length."""


class TensorMetadata(Protocol):
    """What is read of a tensor's metadata; vLLM's ``ParamMeta`` fits."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One tensor: its checkpoint name, its dtype as torch spells it (``"bfloat16"``), its full, unsharded shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as an object. Raises :class:`ManifestError` when torch knows no dtype of this name."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ManifestError(f"tensor {self.name!r} has the unknown dtype {self.dtype!r}")
        return dtype

    @property
    def bytes(self) -> int:
        """Size of the tensor's data."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Manifest:
    """The tensors of one push, in the order in which they travel.

    Raises :class:`ManifestError` on a duplicate name, an unknown dtype or a negative dimension.
    """

    entries: tuple[ManifestEntry, ...]

    def __post_init__(self) -> None:
        duplicates = [name for name, count in Counter(self.names).items() if count > 1]
        if duplicates:
            raise ManifestError(f"announced more than once: {', '.join(sorted(duplicates))}")
        for entry in self.entries:
            _ = entry.torch_dtype
            if any(size < 0 for size in entry.shape):
                raise ManifestError(f"tensor {entry.name!r} has a negative dimension: {entry.shape}")

    @classmethod
    def from_metadata(cls, metadata: Iterable[TensorMetadata]) -> Manifest:
        """The manifest of a weight source's metadata."""
        return cls(tuple(ManifestEntry(m.name, str(m.dtype).removeprefix("torch."), tuple(m.shape)) for m in metadata))

    @classmethod
    def from_wire(cls, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Manifest:
        """The manifest that a trainer announced. Raises :class:`ManifestError` if the columns differ in length."""
        if not len(names) == len(dtype_names) == len(shapes):
            raise ManifestError(
                f"announced {len(names)} names, {len(dtype_names)} dtypes and {len(shapes)} shapes; "
                "the three must have equal length"
            )
        rows = zip(names, dtype_names, shapes, strict=True)
        return cls(tuple(ManifestEntry(name, dtype, tuple(shape)) for name, dtype, shape in rows))

    def to_wire(self) -> dict[str, list[Any]]:
        """The columns ``names``, ``dtype_names`` and ``shapes``, as vLLM's broadcast engines announce them."""
        return {
            "names": self.names,
            "dtype_names": [entry.dtype for entry in self.entries],
            "shapes": [list(entry.shape) for entry in self.entries],
        }

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.entries]

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)

    def foreign(self, dtypes: Collection[torch.dtype]) -> list[str]:
        """The floating-point tensors in none of these ``dtypes``, one readable line each."""
        return [
            f"{entry.name} is {entry.dtype}"
            for entry in self.entries
            if entry.torch_dtype.is_floating_point and entry.torch_dtype not in dtypes
        ]

    def difference(self, other: Manifest) -> list[str]:
        """How ``other``, which came, departs from this manifest, which was expected: one readable line each.

        Empty exactly when both list the same tensors; the order of travel may differ.
        """
        expected = {entry.name: entry for entry in self.entries}
        arrived = {entry.name: entry for entry in other.entries}
        lines = [f"missing: {name}" for name in expected if name not in arrived]
        lines += [f"unexpected: {name}" for name in arrived if name not in expected]
        for name in expected.keys() & arrived.keys():
            if expected[name].shape != arrived[name].shape:
                lines.append(f"wrong shape: {name} is {arrived[name].shape}, expected {expected[name].shape}")
            if expected[name].dtype != arrived[name].dtype:
                lines.append(f"wrong dtype: {name} is {arrived[name].dtype}, expected {expected[name].dtype}")
        return sorted(lines)


def abridged(lines: Sequence[str], limit: int = 8) -> str:
    """The first ``limit`` lines joined for an error message, and how many were left out."""
    shown = "; ".join(lines[:limit])
    return shown if len(lines) <= limit else f"{shown}; and {len(lines) - limit} more"
