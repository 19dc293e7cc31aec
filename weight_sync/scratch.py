"""Memory for a bucket that comes and goes: a mapping of its own, outside of the C library's heap.

Buckets of tens of megabytes, allocated and freed in turns with smaller tensors, leave holes in glibc's heap that later
buckets do not fit into (aligned allocations least of all): a push of 500 MB grew a learner by 800 MB that it did not
use, and gave none of it back. A mapping goes back to the operating system when its last tensor is gone, but for a few
that are kept for the next bucket and the next push: to be given new pages takes about as long as to receive into them.
What does come from the heap in a push, ZeRO-3's gathers, fills its holes one after another: :func:`trim_heap`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Iterable

import numpy as np
import torch

_kept: list[mmap.mmap] = []
_kept_bytes = 64 << 20
"""Of unused mappings, at most: two buckets of the default ``weight_sync.bucket_mib``, until :func:`keep` says more."""


def keep(sizes: Iterable[int], at_once: int) -> None:
    """Keep from now on what the ``at_once`` largest of buckets of these sizes take.

    Without it each push of a model pays for new pages: on a virtual machine up to as long as the bytes travel.
    """
    global _kept_bytes
    _kept_bytes = sum(sorted(sizes)[-at_once:])
    _trim()


def trim_heap() -> None:
    """Give what is free in glibc's heap back to the operating system: milliseconds. Nothing with another C library.

    DeepSpeed gathers each bucket of a ZeRO-3 push into tensors from the heap. Each time they land in other holes of it,
    and 16 buckets of 27 MB grew a learner by 150 MB that were free again.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def scratch(size: int) -> torch.Tensor:
    """``size`` bytes on the CPU, uint8 of shape ``[size]``, with anything in them. Freed with the last view of it."""
    memory = _take(size) or _new(size)
    array = np.frombuffer(memory, dtype=np.uint8, count=size)
    weakref.finalize(array, _give_back, memory).atexit = False  # the tensor's storage holds the array
    return torch.from_numpy(array)


def _new(size: int) -> mmap.mmap:
    # Private: Python's default is memory shared with children, which is slower and has no huge pages.
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)  # five hundred times fewer page faults
    return memory


def _take(size: int) -> mmap.mmap | None:
    """A kept mapping that holds ``size`` bytes and is not much too large. Any thread may free one meanwhile."""
    for memory in list(_kept):
        if size <= len(memory) <= 2 * size:
            with contextlib.suppress(ValueError):  # another thread took it
                _kept.remove(memory)
                return memory
    return None


def _give_back(memory: mmap.mmap) -> None:
    _kept.append(memory)
    _trim()


def _trim() -> None:
    """Let go what is kept beyond the limit, the smallest first: the large ones cost the most to have again."""
    while sum(map(len, kept := list(_kept))) > _kept_bytes:
        largest = max(kept, key=len)
        with contextlib.suppress(ValueError):  # another thread took it
            _kept.remove(largest if len(largest) > _kept_bytes else min(kept, key=len))
