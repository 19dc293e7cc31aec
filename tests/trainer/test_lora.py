"""Adapters on the learner's model: where they go, and what is trained."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.tiny import tiny_llama
from trainer.config import LoRAConfig
from trainer.lora import adapters_off, add_adapters, fingerprint, target_layers
from weight_sync.lora import adapted_layers

SETTINGS = LoRAConfig(rank=2, alpha=4.0)
IDS = torch.tensor([[3, 14, 15, 9, 2, 6]])


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def train_a_little(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for _, layer in adapted_layers(model):
            layer.lora_B["default"].weight.normal_()


def test_without_names_every_linear_layer_but_the_output_head_is_a_target():
    model = tiny_llama(1)
    targets = target_layers(model, [])
    assert len(targets) == 14
    assert "lm_head" not in targets
    assert target_layers(model, ["q_proj", "model.layers.1.mlp.up_proj"]) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    ]


@pytest.mark.parametrize("name", ["q_prj", "lm_head", "embed_tokens", "proj"])
def test_a_target_that_is_no_linear_layer_below_the_head_is_named_with_those_that_are(name):
    with pytest.raises(ValueError, match=rf"`learner\.lora\.targets` names '{name}'.*k_proj, o_proj, q_proj"):
        target_layers(tiny_llama(1), ["v_proj", name])


def test_adapters_change_nothing_at_first_and_alone_are_trained():
    model = tiny_llama(1)
    before = logits(model)
    add_adapters(model, replace(SETTINGS, targets=["q_proj", "down_proj"]))
    assert torch.equal(logits(model), before)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 8
    assert all("lora_" in name for name in trained)


def test_with_its_adapters_off_a_model_computes_as_before_training_and_they_come_on_again():
    model = tiny_llama(1)
    before = logits(model)
    add_adapters(model, SETTINGS)
    train_a_little(model)
    after = logits(model)
    assert not torch.allclose(after, before)
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    with adapters_off(model):
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), after)
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable


def test_a_model_has_one_fingerprint_and_others_have_others():
    assert fingerprint(tiny_llama(1)) == fingerprint(tiny_llama(1))
    assert len({fingerprint(model) for model in (tiny_llama(1), tiny_llama(2), tiny_llama(1).bfloat16())}) == 3
