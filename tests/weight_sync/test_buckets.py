import torch
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.buckets import pack, plan_buckets, unpack
from weight_sync.manifest import Manifest
from weight_sync.source import TensorMeta

DTYPES = [torch.float32, torch.bfloat16, torch.int8]
tensors = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), min_size=0, max_size=3).map(tuple)), max_size=12
)


def _manifest(kinds) -> Manifest:
    return Manifest.from_metadata([TensorMeta(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(kinds)])


@given(tensors, st.integers(0, 200))
def test_every_tensor_travels_once_in_order_and_a_bucket_closes_when_it_is_over_size(kinds, limit):
    manifest = _manifest(kinds)
    buckets = plan_buckets(manifest, limit)
    assert [entry for bucket in buckets for entry in bucket] == list(manifest.entries)
    for bucket in buckets:
        sizes = [entry.bytes for entry in bucket]
        assert sum(sizes[:-1]) <= limit
        if bucket is not buckets[-1]:
            assert sum(sizes) > limit


@given(tensors.filter(bool))
def test_tensors_of_mixed_dtypes_come_out_of_a_bucket_as_they_went_in(kinds):
    sent = [torch.randint(-9, 9, shape).to(dtype) for dtype, shape in kinds]
    [bucket] = plan_buckets(_manifest(kinds), 1 << 20)
    received = unpack(pack(sent), bucket)
    assert [name for name, _ in received] == [f"t{i}" for i in range(len(sent))]
    for tensor, (_, copy) in zip(sent, received, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)


def test_a_transposed_weight_is_packed_by_its_values_not_by_its_memory():
    weight = torch.arange(6.0).view(2, 3)
    [bucket] = plan_buckets(_manifest([(torch.float32, (3, 2))]), 100)
    [(_, received)] = unpack(pack([weight.t()]), bucket)
    assert torch.equal(received, weight.t())
