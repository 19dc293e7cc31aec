"""Low-rank adapters (LoRA): the weights that a run starts from stay as they are, and a product of two small matrices
beside each chosen linear layer is trained. The layers are peft's; how they are pushed: :mod:`weight_sync.lora`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trainer.config import LoRAConfig
from trainer.nearest import nearest
from weight_sync.lora import adapted_layers

SAMPLED_ELEMENTS = 1024
"""Of each weight, for :func:`fingerprint`."""
RECORD_FILE = "lora.json"


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
    """Tells one model from another: names, shapes and dtypes of its weights, and evenly spaced elements of each."""
    seen = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().flatten()
        sample = flat[:: max(1, len(flat) // SAMPLED_ELEMENTS)].contiguous()
        seen.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        seen.update(sample.view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()


class Record:
    """What a checkpoint of adapters alone belongs to. One of all weights has no record, and needs none."""

    def __init__(self, settings: LoRAConfig, model: torch.nn.Module) -> None:
        """To be made before the adapters are added."""
        self._record = asdict(settings) | {"base": fingerprint(model)} if settings.rank else None

    def write(self, folder: str | Path) -> None:
        """Beside the checkpoint that is written into ``folder``."""
        if self._record is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, RECORD_FILE).write_text(json.dumps(self._record), encoding="utf-8")

    def check(self, folder: str | Path) -> None:
        """Raise ``ValueError`` for a checkpoint of other adapters, of another base model, or of all weights."""
        file = Path(folder, RECORD_FILE)
        saved = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
        if saved == self._record:
            return
        if saved is None or self._record is None:
            held, wanted = ("all weights", "an adapter") if saved is None else ("an adapter", "all weights")
            what = f"trains {wanted} (learner.lora.rank), and the checkpoint holds {held}"
        else:
            different = [key for key in self._record if saved.get(key) != self._record[key]]
            said = [
                "another base model (the weights at model.path have changed)"
                if key == "base"
                else f"learner.lora.{key}={saved.get(key)}"
                for key in different
            ]
            what = f"cannot go on from it: it was made with {' and '.join(said)}"
        raise ValueError(f"the learner checkpoint in {folder} does not fit: this run {what}")
