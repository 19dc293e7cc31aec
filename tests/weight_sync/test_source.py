from typing import Any

import pytest
import torch
from torch import nn

from weight_sync.source import DeepSpeedSource, NonFiniteWeightError


class Tied(nn.Module):
    """An embedding tied to its head, one layer, one persistent and one non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.layer = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.layer.register_buffer("scale", torch.ones(2))
        self.layer.register_buffer("cache", torch.ones(2), persistent=False)


def source_of(model: nn.Module, **options: Any) -> DeepSpeedSource:
    return DeepSpeedSource(model, **{"bucket_bytes": 1 << 20, **options})


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def test_a_tied_tensor_is_sent_once_and_what_a_checkpoint_omits_is_not_sent():
    names = [meta.name for meta in source_of(Tied()).metadata()]
    assert names == ["embed.weight", "layer.weight", "layer.bias", "layer.scale"]


@pytest.mark.parametrize("bucket_bytes", [0, 40, 1 << 20])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_iteration_yields_exactly_what_the_metadata_declares_in_its_order(bucket_bytes, dtype):
    source = source_of(Tied(), dtype=dtype, bucket_bytes=bucket_bytes)
    for _ in range(2):  # every pass is a fresh one
        yielded = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
        assert yielded == [tuple(meta) for meta in source.metadata()]


def test_the_values_are_the_current_weights_cast_once():
    model = Tied()
    source = source_of(model, dtype=torch.bfloat16)
    with torch.no_grad():
        model.layer.weight.fill_(1.001)
    assert torch.equal(dict(source)["layer.weight"], torch.full((3, 3), 1.001).bfloat16())


def test_integer_buffers_are_not_cast():
    model = nn.Module()
    model.register_buffer("steps", torch.tensor([3]))
    assert source_of(model, dtype=torch.bfloat16).metadata()[0].dtype == torch.int64


def test_the_prefix_is_taken_off_exactly_once():
    inner = nn.Module()
    inner.model = Tied()
    names = [meta.name for meta in source_of(Wrapper(inner), prefix="model.").metadata()]
    assert names[0] == "model.embed.weight"


def test_a_weight_outside_the_prefix_is_an_error_that_names_it():
    wrapped = Wrapper(Tied())
    wrapped.value_head = nn.Linear(1, 1, bias=False)
    with pytest.raises(ValueError, match=r"value_head\.weight"):
        source_of(wrapped, prefix="model.").metadata()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_weight_is_refused_by_name(poison):
    model = Tied()
    source = source_of(model)
    source.check_finite()
    with torch.no_grad():
        model.layer.bias[1] = poison
    with pytest.raises(NonFiniteWeightError, match=r"1 of 4 .*layer\.bias"):
        source.check_finite()


def test_a_weight_that_overflows_in_the_dtype_of_the_wire_is_refused():
    model = Tied()
    with torch.no_grad():
        model.layer.bias[1] = 1e6
    source_of(model, dtype=torch.bfloat16).check_finite()
    with pytest.raises(NonFiniteWeightError, match=r"layer\.bias"):
        source_of(model, dtype=torch.float16).check_finite()


def test_a_pass_that_was_cut_short_can_be_completed_and_the_next_is_whole():
    source = source_of(Tied(), bucket_bytes=0)
    cut = iter(source)
    next(cut)
    source.finish_pass()
    assert list(cut) == []
    assert len(list(source)) == 4
