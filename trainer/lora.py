"""Low-rank adapters (LoRA): the weights that a run starts from stay as they are, and a product of two small matrices
beside each chosen linear layer is trained. The layers are peft's; how they are pushed: :mod:`weight_sync.lora`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trainer.config import LoRAConfig
from trainer.nearest import nearest
from weight_sync.lora import adapted_layers

SAMPLED_ELEMENTS = 1024
"""Of each weight, for :func:`fingerprint`."""


def add_adapters(model: Any, settings: LoRAConfig) -> None:
    """Put an adapter beside each target of ``model``, in place, and freeze everything else.

    At first they change nothing: one of the two matrices is zero. There is no dropout, since engines sample without.
    Raises ``ValueError`` as :func:`target_layers` does.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = target_layers(model, settings.targets)
    inject_adapter_in_model(LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=targets), model)
    factors = {
        id(p) for _, layer in adapted_layers(model) for part in (layer.lora_A, layer.lora_B) for p in part.parameters()
    }
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in factors)


def target_layers(model: Any, names: Sequence[str]) -> list[str]:
    """The full names of the linear layers of ``model`` whose names end in one of ``names``; without any, all of them.

    Never the output head: the learner reads its weight itself, a chunk of tokens at a time. Raises ``ValueError`` for a
    name that is no such layer's.
    """
    head = model.get_output_embeddings()
    linear = [
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module is not head
    ]
    known = sorted({name.rpartition(".")[2] for name in linear})
    for name in names:
        if not any(_ends_in(layer, name) for layer in linear):
            raise ValueError(
                f"`learner.lora.targets` names {name!r}, which is no linear layer of the model below its output head; "
                f"its linear layers are {', '.join(known)}{nearest(name, known)}"
            )
    return [layer for layer in linear if not names or any(_ends_in(layer, name) for name in names)]


def _ends_in(layer: str, name: str) -> bool:
    return layer == name or layer.endswith(f".{name}")


@contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """Inside, ``model`` computes as it did before training. Gradients are not meant for it."""
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        layer._disable_adapters = True  # peft's own switch also changes what is trainable
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def fingerprint(model: torch.nn.Module) -> str:
    """Tells one model from another: names and shapes of its weights, and evenly spaced elements of each.

    Of the same weights in another dtype it is another.
    """
    seen = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().flatten()
        sample = flat[:: max(1, len(flat) // SAMPLED_ELEMENTS)].contiguous()
        seen.update(f"{name} {tuple(tensor.shape)}".encode())
        seen.update(sample.view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()
