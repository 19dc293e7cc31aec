import pytest
import torch

from weight_sync.digest import DigestError, check_digests, digest, to_wire, wire_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def some_tensor(dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 2, (6, 5), generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_changed_byte_changes_the_digest(dtype):
    tensor = some_tensor(dtype)
    original = tensor.contiguous().view(-1).view(torch.uint8)
    for position in range(original.numel()):
        damaged = original.clone()
        damaged[position] ^= 1
        assert digest(damaged) != digest(tensor), position


def test_the_order_of_elements_counts():
    tensor = torch.arange(30.0).view(6, 5)
    assert digest(tensor.flip(0)) != digest(tensor)


def test_only_the_bytes_count_not_how_they_lie_in_memory():
    tensor = torch.arange(30.0, dtype=torch.bfloat16).view(6, 5)
    transposed = tensor.t().contiguous().t()
    unaligned = torch.cat([torch.zeros(1, dtype=torch.uint8), tensor.view(-1).view(torch.uint8)])[1:]
    assert digest(transposed) == digest(unaligned) == digest(tensor.view(-1)) == digest(tensor)


def test_a_single_number_and_an_empty_tensor_have_digests():
    assert digest(torch.tensor(1.5)) != digest(torch.tensor(2.5))
    assert digest(torch.empty(0, 4)) == digest(torch.empty(0))


def test_what_arrived_as_it_was_sent_passes_and_the_rest_is_named():
    tensors = {name: torch.full((3,), float(number)) for number, name in enumerate("abc")}
    sent = to_wire([digest(tensor) for tensor in tensors.values()])
    assert sent.numel() == wire_bytes(3)
    check_digests("abc", [digest(tensor) for tensor in tensors.values()], sent)
    arrived = [digest(tensors["b"]), digest(tensors["a"]), digest(tensors["c"])]
    with pytest.raises(DigestError, match=r"^2 of 3 tensors .*: a; b$"):
        check_digests("abc", arrived, sent)
