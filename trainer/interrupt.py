"""Giving up a training step from another thread, so that no rank is left alone in a collective."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist


class Interrupt:
    """Set once, from any thread, on every rank; raised where the work looks for it.

    A single rank looks before each layer, forward and backward: on a slow machine a micro-batch takes longer than one
    may wait. Several, which must stay together, look before each micro-batch.
    """

    def __init__(self, world_size: int, device: torch.device) -> None:
        self._world_size, self._device = world_size, device
        self._event = threading.Event()

    def set(self) -> None:
        """Have the work in progress end with ``InterruptedError``, and any later work at its first look."""
        self._event.set()

    def watch_layers(self, model: torch.nn.Module) -> None:
        """Have the layers of ``model`` look; does nothing with several ranks."""

        def look(*_: Any) -> None:
            if self._event.is_set():
                raise InterruptedError

        if self._world_size > 1:
            return
        for module in model.modules():
            if isinstance(module, torch.nn.ModuleList):
                for layer in module:
                    layer.register_forward_pre_hook(look)
                    layer.register_full_backward_pre_hook(look)

    def look(self) -> None:
        """Raise ``InterruptedError`` on all ranks if any was interrupted. A collective."""
        interrupted = self._event.is_set()
        if self._world_size > 1:
            any_rank = torch.tensor(float(interrupted), device=self._device)
            dist.all_reduce(any_rank, op=dist.ReduceOp.MAX)
            interrupted = bool(any_rank)
        if interrupted:
            raise InterruptedError
