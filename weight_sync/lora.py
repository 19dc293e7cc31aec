"""Low-rank adapters (LoRA) in a learner's model, as peft builds them: which tensors belong together, and their product.

A linear layer with weight ``W [out, in]`` and an adapter computes with ``W + scaling B A``, where ``A [r, in]`` and
``B [out, r]`` are trained and ``W`` is not (Hu et al. 2021, https://arxiv.org/abs/2106.09685). peft puts a layer of its
own in the place of the linear one, which it keeps as ``base_layer``. Nothing here imports peft: its layers are told by
what they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from weight_sync.scratch import scratch

LoraPart = Literal["merged", "base", "adapter"]
"""What is read of a model with adapters: the weights that it computes with, those without the adapters, or these."""

PEFT_PREFIX = "base_model.model."
"""Stands before the names in a file of peft's."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """The adapter of one linear layer: ``down`` is A ``[r, in]``, ``up`` is B ``[out, r]``, in any floating dtype."""

    layer: str
    """Name of the linear layer in the model, as without an adapter."""
    down: torch.Tensor
    up: torch.Tensor
    scaling: float

    @property
    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.down, self.up

    def merge(self, elements: torch.Tensor, start: int = 0) -> torch.Tensor:
        """The flat ``elements`` of W from ``start`` on, with those of ``scaling B A`` added; in float32 at least.

        The result of an element does not depend on which others are asked for with it, bit for bit: what a rank
        compares of its share is what is sent of the whole. The factors must be there in full.
        """
        dtype = torch.promote_types(elements.dtype, torch.float32)
        down, up = self.down.detach().to(dtype), self.up.detach().to(dtype)
        update = _empty((up.shape[0], down.shape[1]), dtype, down.device)
        torch.mm(up, down, out=update)
        flat = update.view(-1)[start : start + elements.numel()]
        return flat.mul_(self.scaling).add_(elements)


def _empty(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return scratch(shape[0] * shape[1] * dtype.itemsize).view(dtype).view(shape)


def adapters_of(module: torch.nn.Module) -> dict[int, Adapter]:
    """Every adapter in ``module``, by the ``id`` of the weight that it adds to.

    Raises ``ValueError`` for one that is more than two matrices beside one linear layer.
    """
    return {id(layer.base_layer.weight): _adapter(name, layer) for name, layer in adapted_layers(module)}


def adapted_layers(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """peft's layers in ``module``, with their names."""
    for name, layer in module.named_modules():
        if hasattr(layer, "base_layer") and hasattr(layer, "lora_A"):
            yield name, layer


def _adapter(name: str, layer: Any) -> Adapter:
    names = list(layer.lora_A)
    if len(names) != 1:
        raise ValueError(f"layer {name} has {len(names)} adapters ({', '.join(names)}); one can be pushed")
    (key,) = names
    down, up = layer.lora_A[key], layer.lora_B[key]
    if not isinstance(layer.base_layer, torch.nn.Linear) or up.bias is not None or getattr(layer, "lora_variant", None):
        raise ValueError(
            f"the adapter of layer {name} is more than two matrices beside a linear layer; it cannot be pushed"
        )
    return Adapter(name, down.weight, up.weight, float(layer.scaling[key]))


def peft_config(adapters: Iterable[Adapter]) -> dict[str, Any]:
    """What peft's ``adapter_config.json`` says of these adapters. Raises ``ValueError`` where there are none."""
    adapters = list(adapters)
    if not adapters:
        raise ValueError("the model has no adapter")
    first = adapters[0]
    rank = int(getattr(first.down, "ds_shape", first.down.shape)[0])
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": first.scaling * rank,
        "target_modules": sorted({adapter.layer.rpartition(".")[2] for adapter in adapters}),
        "bias": "none",
    }
