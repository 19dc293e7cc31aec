"""A second set of layers beside a running vLLM model, to be loaded in the background and exchanged in a pause.

What a layer computes with is made from its checkpoint weights when they are loaded: on CPU oneDNN packs the weight of a
linear layer into memory of its own, behind a function in the layer's attribute ``cpu_linear``; quantised layers repack
on GPUs. A twin has the structure of the model and tensors of its own, so vLLM's layer-wise reload does all that to it
while the model computes. The exchange then moves tensors and attributes and computes nothing.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel

_CONTAINERS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""Attributes of a module that hold what is copied or exchanged one by one."""


class Twin:
    """``model`` is the second set. Only loading may be done to it: running it would read the first one's attributes.

    Costs the memory of the loaded model once more until it is released. Building it copies the tensors that the model
    holds: on CPU, where linear layers keep none, those are embeddings, norms and tables.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers: list[tuple[torch.nn.Module, torch.nn.Module, dict[str, Any]]] = []
        """A layer of the model, its twin, and what the layer's attributes were."""
        self._twins: dict[int, torch.nn.Module] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self.model = self._twin_of(model)
        for layer, twin, _ in self._layers:
            for tensor in (*twin._parameters.values(), *twin._buffers.values()):
                if tensor is not None:
                    self._rebind(tensor, layer, twin)
            self._prepare_reload(layer, twin)

    @torch.no_grad()
    def exchange(self) -> None:
        """Give the model what the twin has, and the twin what the model had. Nothing may run the model meanwhile."""
        exchanged: set[int] = set()
        for layer, twin, before in self._layers:
            for mine, others in ((layer._parameters, twin._parameters), (layer._buffers, twin._buffers)):
                for name, tensor in mine.items():
                    other = others.get(name)
                    if tensor is not None and other is not None and id(tensor) not in exchanged:
                        exchanged.add(id(tensor))
                        _exchange_tensor(tensor, other)
            for name, value in list(twin.__dict__.items()):
                if name not in _CONTAINERS and value is not before.get(name):
                    twin.__dict__[name] = layer.__dict__.get(name)
                    layer.__dict__[name] = value

    def release(self) -> None:
        """Give the memory back, at once: layers and their tensors refer to each other in circles, and vLLM's record of
        a reload refers to both, so nobody else would.
        """
        for _, twin, before in self._layers:
            LAYERWISE_INFO.pop(twin, None)
            twin.__dict__.clear()
            before.clear()
        self._layers, self._twins, self._tensors = [], {}, {}

    def _twin_of(self, layer: torch.nn.Module) -> torch.nn.Module:
        """The twin of a module; the same one wherever the module occurs."""
        if id(layer) in self._twins:
            return self._twins[id(layer)]
        twin: torch.nn.Module = object.__new__(type(layer))
        self._twins[id(layer)] = twin
        before = layer.__dict__.copy()
        twin.__dict__.update(before)
        twin.__dict__["_parameters"] = {name: self._copy_of(tensor) for name, tensor in layer._parameters.items()}
        twin.__dict__["_buffers"] = {name: self._copy_of(tensor) for name, tensor in layer._buffers.items()}
        twin.__dict__["_non_persistent_buffers_set"] = set(layer._non_persistent_buffers_set)
        twin.__dict__["_modules"] = {
            name: None if child is None else self._twin_of(child) for name, child in layer._modules.items()
        }
        self._layers.append((layer, twin, before))
        return twin

    def _copy_of(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """A tensor of the same kind with its own memory; tied ones stay tied."""
        if tensor is None or id(tensor) in self._tensors:
            return None if tensor is None else self._tensors[id(tensor)]
        copy = tensor.detach().clone()
        copy.__class__ = tensor.__class__
        copy.__dict__ = tensor.__dict__.copy()
        self._tensors[id(tensor)] = copy
        return copy

    def _rebind(self, tensor: torch.Tensor, layer: torch.nn.Module, twin: torch.nn.Module) -> None:
        """Weight loaders are methods of layers, held by tensors: a twin's tensor gets those of twins."""
        for name, value in tensor.__dict__.items():
            while getattr(value, "__name__", "") == "online_process_loader":  # of an earlier reload
                value = value.__wrapped__
            if isinstance(value, MethodType):
                owner = layer if value.__self__ is layer_ref_sentinel else value.__self__
                value = MethodType(value.__func__, self._twins.get(id(owner), owner))
            tensor.__dict__[name] = value

    def _prepare_reload(self, layer: torch.nn.Module, twin: torch.nn.Module) -> None:
        """What vLLM recorded of the layer when it was built, for the reload of its twin."""
        recorded, mine = get_layerwise_info(layer), get_layerwise_info(twin)
        mine.restore_device = recorded.restore_device
        parameters, buffers = (
            {name: to_meta_tensor(tensor) for name, tensor in tensors.items()} for tensors in recorded.restore_metadata
        )
        for tensor in (*parameters.values(), *buffers.values()):
            self._rebind(tensor, layer, twin)
        mine.restore_metadata = (parameters, buffers)


def _exchange_tensor(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """On CPU the two change memory. CUDA graphs know the addresses of a model's tensors, so there they are filled."""
    if tensor.device.type == "cpu":
        tensor.data, other.data = other.data, tensor.data
    else:
        tensor.data.copy_(other)
