"""One complete replacement of a vLLM model's weights through vLLM's layer-wise reload, with the checks it lacks.

Written against vLLM 0.32, whose reload accepts an update with missing tensors, leaves a layer on the meta device when
loading fails, goes on counting from a failed update in the next one, and on CPU keeps a tied output head stale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from weight_sync.manifest import abridged


class LoadError(ValueError):
    """The model refused a tensor that was announced and arrived. Names where it stopped."""


class IncompleteUpdateError(RuntimeError):
    """An update that is not whole: tensors announced or needed are missing. The engine must not serve."""


def held_dtypes(model: torch.nn.Module, model_config: Any) -> set[torch.dtype]:
    """The floating-point dtypes of a vLLM model's weights: the one it computes in, and those of single parameters."""
    tensors = [*model.parameters(), *model.buffers()]
    return {model_config.dtype} | {tensor.dtype for tensor in tensors if tensor.is_floating_point()}


class LayerwiseUpdate:
    """A reload in progress: :meth:`begin`, :meth:`load` once a bucket, :meth:`loaded`, :meth:`finish`; or abandoned."""

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model: Any = model  # with the methods of vLLM's models
        self._model_config = model_config
        self._names: set[str] = set()
        self._last_name = "(no tensor)"

    def begin(self) -> None:
        """Take the model's weights off for replacement. The engine must be paused."""
        initialize_layerwise_reload(self._model)

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load some tensors in checkpoint format. They must not be written to until :meth:`finish`.

        Raises :class:`LoadError` naming the tensor at which the model refused.
        """
        try:
            self._model.load_weights(self._noted(pairs))
        except Exception as error:
            raise LoadError(f"the model refused {self._last_name!r}: {type(error).__name__}: {error}") from error

    def _noted(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in pairs:
            self._last_name = name
            self._names.add(name)
            yield name, tensor

    def loaded(self) -> None:
        """There are no more tensors. Raises :class:`IncompleteUpdateError` naming the weights that none has filled."""
        if missing := self._incomplete():
            raise IncompleteUpdateError(f"the update leaves weights of the model unfilled: {abridged(missing)}")

    def finish(self) -> None:
        """Complete the layers that wait for it, and bring tied output heads up to date."""
        finalize_layerwise_reload(self._model, self._model_config)
        vocabulary = [layer for layer in self._model.modules() if isinstance(layer, VocabParallelEmbedding)]
        embeddings = {id(layer.weight) for layer in vocabulary if not isinstance(layer, ParallelLMHead)}
        for layer in vocabulary:
            # On CPU the head multiplies by a packed copy of its weight. The reload packs a layer that received tensors;
            # a tied head receives none, so its copy would stay that of the old embedding. Nothing happens on GPUs.
            if isinstance(layer, ParallelLMHead) and id(layer.weight) in embeddings:
                layer.quant_method.process_weights_after_loading(layer)

    def abandon(self) -> None:
        """Put the tensors back on every layer that has not been replaced, and forget what had been buffered for it.

        The model then runs, on old, new or mixed weights: only a complete update makes it trustworthy again.
        """
        if hasattr(self._model, "_original_do_torchao_reload"):
            self._model._do_torchao_reload = self._model._original_do_torchao_reload
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()

    def _incomplete(self) -> list[str]:
        """The parameters that no tensor has filled, one line each, by checkpoint name where it is known."""
        filled = _weights_behind(layer for layer in self._model.modules() if _loaded(layer) > 0)
        lines: list[str] = []
        for path, layer in self._model.named_modules():
            if is_deferred_attention_layer(layer):
                continue  # its scales are optional and are completed by finalize
            missing = _expected(layer) - _loaded(layer)
            if missing <= 0 or (_loaded(layer) == 0 and _weights_behind([layer]) <= filled):
                continue  # filled, or nothing but other layers' tensors under a second name (a tied head)
            lines += self._explain(path, layer, missing)
        return lines

    def _explain(self, path: str, layer: torch.nn.Module, missing: int) -> list[str]:
        """Name what is missing in a layer: the parts of a fused one, else its parameters."""
        path = path.removesuffix(".base_layer")  # under which vLLM keeps a layer that can have an adapter
        parent, _, leaf = path.rpartition(".")
        fused = getattr(self._model, "packed_modules_mapping", {}).get(leaf, [])
        parts = [f"{parent}.{part}.{name}" for part in fused for name in layer._parameters]
        absent = [name for name in parts if name not in self._names]
        if absent and len(absent) < len(parts):
            return absent
        names = ", ".join(name for name, parameter in layer._parameters.items() if parameter is not None)
        return [f"{path} ({names}): {missing} of {_expected(layer)} elements"]


def _expected(layer: torch.nn.Module) -> int:
    """Elements that a complete update loads into the layer: its parameters, without padding."""
    if isinstance(layer, VocabParallelEmbedding) and layer.weight.ndim == 2:
        return int(layer.shard_indices.num_org_elements * layer.weight.shape[1])
    return sum(
        get_tensor_load_numel(parameter)
        for name, parameter in layer._parameters.items()
        if parameter is not None and name not in SKIP_LOAD_TENSORS
    )


def _loaded(layer: torch.nn.Module) -> int:
    """Elements loaded so far. A layer that vLLM has completed no longer counts: all of them."""
    info = get_layerwise_info(layer)
    return info.load_numel if info.can_load() else _expected(layer)


def _weights_behind(layers: Iterable[torch.nn.Module]) -> set[int]:
    """Identities of the parameters that the engine computes with in these layers, replaced or not."""
    found: set[int] = set()
    for layer in layers:
        info = get_layerwise_info(layer)
        waiting = info.can_load() and info.kernel_tensors is not None
        parameters = info.kernel_tensors[0] if waiting else layer._parameters
        found |= {id(parameter) for parameter in parameters.values() if parameter is not None}
    return found
