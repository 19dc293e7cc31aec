"""What is added to vLLM's worker class, to be asked for by name over ``collective_rpc``.

vLLM's workers answer between two steps of generation, so nothing here may take long.
"""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Mixed into the worker by vLLM's ``worker_extension_cls``."""

    weight_transfer_engine: Any
    model_runner: Any

    def weight_update_staged(self) -> bool:
        """Whether the staged update has arrived and only has to be swapped in. Raises what went wrong with it."""
        staged: bool = self.weight_transfer_engine.staged()
        return staged

    def adapter_layers_left_out(self, adapter_id: int) -> list[str]:
        """The layers of a loaded adapter beside which this model has made no room: vLLM 0.32 passes over them with a
        line for debugging, and computes with the base there.

        Names are vLLM's, so of a fused layer where its parts have been packed. Raises ``RuntimeError`` for an adapter
        that the model does not compute with at all.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        adapter = manager.get_adapter(adapter_id)
        if adapter is None or adapter_id not in manager.lora_index_to_id:
            raise RuntimeError(f"the model computes with adapters {manager.lora_index_to_id}, without {adapter_id}")
        return sorted(set(adapter.loras) - set(manager.modules))
