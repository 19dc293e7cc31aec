import re
from pathlib import Path

import pytest
import torch

from weight_sync import scratch as scratch_module
from weight_sync.scratch import keep, scratch, trim_heap


def resident() -> int:
    """Bytes of this process that are in memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_the_memory_is_writable_and_of_the_size_that_was_asked_for(size):
    memory = scratch(size)
    assert memory.shape == (size,)
    assert memory.dtype == torch.uint8
    memory.fill_(3)
    assert memory.sum() == 3 * size


def test_memory_stays_with_a_view_of_it_and_goes_back_with_the_last_one():
    size = 80 << 20
    before = resident()
    memory = scratch(size).fill_(1)
    half = memory[size // 2 :].view(torch.float32)
    del memory
    assert resident() - before > 0.9 * size
    assert torch.equal(half, torch.full((size // 8,), 1, dtype=torch.uint8).repeat(4).view(torch.float32))
    del half
    assert resident() - before < 0.3 * size  # room for what torch itself keeps


def test_memory_is_used_again_when_nothing_views_it_any_more_and_not_before():
    first = scratch(1 << 20)
    view = first[100:200]
    where = first.data_ptr()
    del first
    assert scratch(1 << 20).data_ptr() != where
    view.fill_(7)
    taken = [scratch(1 << 20) for _ in range(8)]
    assert where not in [memory.data_ptr() for memory in taken]
    assert (view == 7).all()
    del view
    assert scratch((1 << 20) - 5).data_ptr() == where


def test_the_largest_buckets_of_a_push_are_kept_whatever_their_order_and_no_more(monkeypatch):
    monkeypatch.setattr(scratch_module, "_kept", [])
    monkeypatch.setattr(scratch_module, "_kept_bytes", 0)
    keep([30 << 20, 1 << 20, 10 << 20, 10 << 20, 10 << 20], at_once=3)
    for sizes in ([30, *12 * [10]], [*12 * [10], 30]):
        memories = [scratch(size << 20) for size in sizes]
        while memories:
            del memories[0]
        assert sorted(len(memory) >> 20 for memory in scratch_module._kept) == [10, 10, 30]
    keep([10 << 20], at_once=3)
    assert [len(memory) >> 20 for memory in scratch_module._kept] == [10]


def test_what_is_free_in_the_heap_below_something_that_is_not_goes_back_when_it_is_trimmed():
    blocks = [torch.ones(64 << 10, dtype=torch.uint8) for _ in range(1000)]
    last = blocks[-1]
    del blocks
    before = resident()
    trim_heap()
    assert before - resident() > 40 << 20
    assert (last == 1).all()
