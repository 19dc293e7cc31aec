"""Memory for a bucket that comes and goes: a mapping of its own, outside of the C library's heap.

Buckets of tens of megabytes, allocated and freed in turns with smaller tensors, leave holes in glibc's heap that later
buckets do not fit into (aligned allocations least of all): a push of 500 MB grew a learner by 800 MB that it did not
use, and gave none of it back. A mapping goes back to the operating system when its last tensor is gone.
"""

from __future__ import annotations

import contextlib
import mmap

import torch


def scratch(size: int) -> torch.Tensor:
    """``size`` bytes on the CPU, uint8 of shape ``[size]``, all zero. Freed with the last view of it."""
    # Private: Python's default is memory shared with children, which is slower and has no huge pages.
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)  # five hundred times fewer page faults
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]
