"""What changed travels and arrives bit for bit, whatever the numbers are."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from weight_sync.buckets import pack, plan_buckets, unpack
from weight_sync.delta import (
    BLOCK,
    Patch,
    bits,
    changed_positions,
    decode_positions,
    delta_manifest,
    encode_positions,
    make_delta,
)
from weight_sync.manifest import Manifest, ManifestEntry, ManifestError

INTEGERS = {"float32": torch.int32, "bfloat16": torch.int16, "float16": torch.int16, "uint8": torch.uint8}
DTYPES = st.sampled_from(sorted(INTEGERS))
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


def random_bits(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Any bits at all: NaNs with payloads, both zeros, infinities and subnormal numbers among them."""
    whole = torch.iinfo(INTEGERS[dtype])
    dice = torch.Generator().manual_seed(seed)
    numbers = torch.randint(whole.min, whole.max + 1, (math.prod(shape),), generator=dice, dtype=torch.int64)
    return numbers.to(INTEGERS[dtype]).view(getattr(torch, dtype)).view(shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bool((bits(one) == bits(other)).all())


@st.composite
def pushes(draw: st.DrawFn) -> tuple[Manifest, list[torch.Tensor], list[torch.Tensor]]:
    """A manifest, what the engine holds, and what it is to hold: of each tensor nothing, some or all has changed."""
    entries, before, after = [], [], []
    for number, (dtype, shape) in enumerate(draw(st.lists(st.tuples(DTYPES, SHAPES), min_size=1, max_size=5))):
        entries.append(ManifestEntry(f"layers.{number}.a weight", dtype, shape))
        old = random_bits(shape, dtype, 2 * number)
        new = random_bits(shape, dtype, 2 * number + 1)
        share = draw(st.sampled_from([0.0, 0.2, 1.0]))
        chosen = torch.rand(shape, generator=torch.Generator().manual_seed(number)) < share
        mixed = torch.where(chosen.to(torch.bool), bits(new), bits(old)).view(old.dtype)
        before.append(old)
        after.append(mixed)
    return Manifest(tuple(entries)), before, after


@settings(deadline=None)
@given(pushes(), st.integers(1, 300))
def test_a_delta_in_buckets_of_any_size_makes_the_old_bytes_the_new_ones(push, bucket_bytes):
    whole, before, after = push
    changes = []
    for old, new in zip(before, after, strict=True):
        positions = changed_positions(old.flatten(), new.flatten())
        assert len(positions) == int((bits(old) != bits(new)).sum())
        changes.append((positions, new.flatten()[positions]))
    delta = make_delta(6, whole, changes)
    assert sum(tensor.nbytes for tensor in delta.tensors) == delta.manifest.total_bytes

    held = {entry.name: tensor.clone() for entry, tensor in zip(whole.entries, before, strict=True)}
    patch = Patch(held, whole, delta.changed)
    sent = dict(zip(delta.manifest.names, delta.tensors, strict=True))
    for bucket in plan_buckets(patch.manifest, bucket_bytes):
        patch.load(unpack(pack([sent[entry.name] for entry in bucket]), bucket))
    assert all(same_bits(held[entry.name], new) for entry, new in zip(whole.entries, after, strict=True))


@settings(deadline=None)
@given(pushes())
def test_the_patches_of_a_delta_are_the_changes_that_it_was_made_of(push):
    whole, before, after = push
    changes = [
        (positions := changed_positions(old.flatten(), new.flatten()), new.flatten()[positions])
        for old, new in zip(before, after, strict=True)
    ]
    delta = make_delta(6, whole, changes)
    expected = [
        (entry, positions, values)
        for entry, (positions, values) in zip(whole.entries, changes, strict=True)
        if len(positions)
    ]
    for patch, (entry, positions, values) in zip(delta.patches(), expected, strict=True):
        assert patch[0] == entry
        assert torch.equal(patch[1], positions)
        assert same_bits(patch[2], values)
    sizes = [len(positions) * (4 + values.element_size()) for _, positions, values in expected]
    floating = all(values.is_floating_point() for _, _, values in expected)
    assert delta.patch_bytes == (sum(sizes) if expected and floating else None)


def test_zeros_of_two_signs_differ_and_a_nan_equals_itself():
    before = torch.tensor([0.0, float("nan"), 1.0])
    assert changed_positions(before, torch.tensor([-0.0, float("nan"), 1.0])).tolist() == [0]
    other_nan = bits(before).clone()
    other_nan[1] ^= 1
    assert changed_positions(before, other_nan.view(torch.float32)).tolist() == [1]


@settings(deadline=None)
@given(st.sets(st.integers(0, 3 * BLOCK + 5), max_size=40))
def test_positions_survive_their_encoding_across_blocks(positions):
    ascending = torch.tensor(sorted(positions), dtype=torch.int64)
    counts, offsets = encode_positions(ascending, 3 * BLOCK + 6)
    assert (counts.dtype, offsets.dtype) == (torch.int32, torch.int16)
    assert len(counts) == 4
    assert torch.equal(decode_positions(counts, offsets), ascending)


def test_a_changed_bfloat16_element_takes_four_bytes():
    whole = Manifest((ManifestEntry("w", "bfloat16", (BLOCK, 4)),))
    assert delta_manifest(whole, [1000]).total_bytes == 4 * 1000 + 4 * 4
    assert delta_manifest(whole, [0]).total_bytes == 0


def test_what_cannot_be_a_delta_is_refused():
    whole = Manifest((ManifestEntry("w", "float32", (3, 2)),))
    with pytest.raises(ManifestError, match="7 changes of 'w', which has 6 elements"):
        delta_manifest(whole, [7])
    with pytest.raises(ManifestError, match="2 counts of changes for 1 tensors"):
        delta_manifest(whole, [1, 1])
    with pytest.raises(ManifestError, match="count 2 changes, but it has 1"):
        decode_positions(torch.tensor([2], dtype=torch.int32), torch.zeros(1, dtype=torch.int16))
    held = {"w": torch.zeros(3, 2)}
    parts = [("w counts", torch.tensor([1], dtype=torch.int32)), ("w offsets", torch.tensor([0], dtype=torch.int16))]
    with pytest.raises(ManifestError, match="element 32768 of 'w'"):
        Patch(held, whole, [1]).load([*parts, ("w values", torch.ones(1))])
    assert not held["w"].any()
