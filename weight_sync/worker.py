"""What is added to vLLM's worker class, to be asked for by name over ``collective_rpc``.

vLLM's workers answer between two steps of generation, so nothing here may take long.
"""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Mixed into the worker by vLLM's ``worker_extension_cls``."""

    weight_transfer_engine: Any

    def weight_update_staged(self) -> bool:
        """Whether the staged update has arrived and only has to be swapped in. Raises what went wrong with it."""
        staged: bool = self.weight_transfer_engine.staged()
        return staged
