"""What a source reads of a model with peft's adapters: merged, the base, or the adapter alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn

from weight_sync.adapter_files import files_of, manifest_of
from weight_sync.delta import bits
from weight_sync.lora import PEFT_PREFIX
from weight_sync.snapshot import Snapshot
from weight_sync.source import DeepSpeedSource, NonFiniteWeightError


class Plain(nn.Module):
    """An embedding tied to its head, and two linear layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 9)
        self.second = nn.Linear(9, 6, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight


def adapted(**changes: Any) -> Any:
    """peft's model with a trained adapter beside both linear layers."""
    torch.manual_seed(0)
    model = get_peft_model(
        Plain(), LoraConfig(**{"r": 2, "lora_alpha": 3, "target_modules": ["first", "second"]} | changes)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


def source_of(model: nn.Module, **options: Any) -> DeepSpeedSource:
    return DeepSpeedSource(model, **{"prefix": PEFT_PREFIX, "bucket_bytes": 100, **options})


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_merged_weights_are_those_that_peft_merges_cast_once_in_the_order_of_the_model_without_adapters(dtype):
    model = adapted()
    expected = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    source = source_of(model, dtype=dtype)
    merged = dict(source)
    assert list(merged) == list(expected) == ["embed.weight", "first.weight", "first.bias", "second.weight"]
    assert [tuple(meta) for meta in source.metadata()] == [(n, t.dtype, tuple(t.shape)) for n, t in merged.items()]
    for name, tensor in expected.items():
        assert torch.equal(merged[name], tensor.detach().to(dtype or tensor.dtype)), name


def test_the_base_is_the_model_without_its_adapter():
    model = adapted()
    plain = dict(copy.deepcopy(model).unload().named_parameters())
    base = dict(source_of(model, lora="base"))
    assert list(base) == list(plain)
    assert all(torch.equal(base[name], tensor) for name, tensor in plain.items())


def test_the_adapter_alone_has_the_names_that_peft_saves_it_under():
    model = adapted()
    expected = get_peft_model_state_dict(model)
    source = source_of(model, lora="adapter")
    adapter = {PEFT_PREFIX + name: tensor for name, tensor in source}
    assert adapter.keys() == expected.keys()
    assert all(torch.equal(adapter[name], tensor) for name, tensor in expected.items())
    config = source.peft_config()
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 3.0, ["first", "second"])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_ranks_compare_of_merged_weights_is_bit_for_bit_what_is_sent(ranks):
    source = source_of(adapted(), dtype=torch.bfloat16)
    shares = [list(source.shares(rank, ranks)) for rank in range(ranks)]
    for (name, sent), *held in zip(source, *shares, strict=True):
        together = torch.cat([share.elements.to(sent.dtype) for share in held])
        assert bool((bits(together) == bits(sent.flatten())).all()), name


def test_a_delta_finds_what_an_adapter_changed_and_nothing_of_the_weights_without_one():
    model = adapted()
    source = source_of(model, dtype=torch.bfloat16)
    snapshot = Snapshot()
    snapshot.take(1, source.manifest(), source.shares(0, 1))
    factor = model.base_model.model.second.lora_B["default"].weight
    with torch.no_grad():
        factor[0] += 1.0
    delta = snapshot.find(1, source.manifest(), source.shares(0, 1))
    assert delta is not None
    assert delta.changed == (0, 0, 0, 9)


def test_a_merged_weight_that_is_not_finite_is_named_though_both_of_its_parts_are():
    model = adapted()
    layer = model.base_model.model.first
    with torch.no_grad():
        layer.lora_A["default"].weight.fill_(1e30)
        layer.lora_B["default"].weight.fill_(1e30)
    source_of(model, lora="base").check_finite()
    source_of(model, lora="adapter").check_finite()
    with pytest.raises(NonFiniteWeightError, match=r"1 of 4 weights .*first\.weight"):
        source_of(model).check_finite()


def test_an_adapter_that_is_more_than_two_matrices_is_refused_by_the_name_of_its_layer():
    with pytest.raises(ValueError, match=r"the adapter of layer .*first is more than two matrices"):
        source_of(adapted(use_dora=True))
    with pytest.raises(ValueError, match=r"layer .*embed "):
        source_of(adapted(target_modules=["embed"]))


def test_a_second_adapter_is_refused():
    model = adapted()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["first"]))
    with pytest.raises(ValueError, match=r"first has 2 adapters \(default, other\)"):
        source_of(model)


def test_files_arrive_as_they_were_sent_or_are_refused():
    source = source_of(adapted(), lora="adapter")
    files = files_of(source)
    assert manifest_of(files).difference(source.manifest()) == []
    damaged = bytearray(files.weights)
    damaged[-3] ^= 4
    with pytest.raises(ValueError, match="did not arrive as it was sent"):
        manifest_of(type(files)(files.config, bytes(damaged), files.checksum))


def test_a_model_without_adapters_has_no_adapter_to_send():
    with pytest.raises(ValueError, match="no adapter"):
        files_of(DeepSpeedSource(Plain(), bucket_bytes=100, lora="adapter"))
