import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.manifest import Manifest, ManifestEntry, ManifestError, abridged
from weight_sync.source import TensorMeta

entries = st.builds(
    ManifestEntry,
    name=st.sampled_from(["a", "b", "c", "d"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    shape=st.lists(st.integers(0, 3), max_size=2).map(tuple),
)
manifests = st.lists(entries, max_size=4, unique_by=lambda entry: entry.name).map(lambda e: Manifest(tuple(e)))


def manifest(**tensors: tuple[str, tuple[int, ...]]) -> Manifest:
    return Manifest(tuple(ManifestEntry(name, dtype, shape) for name, (dtype, shape) in tensors.items()))


def test_metadata_becomes_entries_with_wire_dtype_names_and_sizes():
    made = Manifest.from_metadata([TensorMeta("w", torch.bfloat16, (2, 3)), TensorMeta("n", torch.int64, ())])
    assert made.entries == (ManifestEntry("w", "bfloat16", (2, 3)), ManifestEntry("n", "int64", ()))
    assert made.total_bytes == 2 * 3 * 2 + 8


@given(manifests)
def test_a_manifest_survives_the_wire(sent: Manifest):
    assert Manifest.from_wire(**sent.to_wire()) == sent


@given(manifests, manifests)
def test_two_manifests_differ_exactly_when_they_list_other_tensors(one: Manifest, other: Manifest):
    assert (one.difference(other) == []) == (set(one.entries) == set(other.entries))


def test_the_difference_names_what_is_missing_unexpected_or_of_the_wrong_kind():
    expected = manifest(a=("float32", (2,)), b=("float32", (2,)), c=("float32", (2,)))
    arrived = manifest(b=("float32", (3,)), c=("float16", (2,)), x=("float32", (1,)))
    assert expected.difference(arrived) == [
        "missing: a",
        "unexpected: x",
        "wrong dtype: c is float16, expected float32",
        "wrong shape: b is (3,), expected (2,)",
    ]


def test_the_order_of_travel_is_no_difference():
    one = manifest(a=("float32", (2,)), b=("float32", (1,)))
    assert one.difference(Manifest(one.entries[::-1])) == []


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "complaint"),
    [
        (["a", "a"], ["float32", "float32"], [[1], [1]], "more than once: a"),
        (["a"], ["float33"], [[1]], "unknown dtype 'float33'"),
        (["a"], ["nn"], [[1]], "unknown dtype 'nn'"),
        (["a"], ["float32"], [[-1]], "negative dimension"),
        (["a", "b"], ["float32"], [[1]], "2 names, 1 dtypes and 1 shapes"),
    ],
)
def test_an_announcement_that_cannot_be_a_push_is_refused(names, dtypes, shapes, complaint):
    with pytest.raises(ManifestError, match=complaint):
        Manifest.from_wire(names, dtypes, shapes)


def test_a_long_list_of_faults_is_abridged_with_its_count():
    assert abridged(["a", "b", "c"], limit=2) == "a; b; and 1 more"
