"""vLLM's nccl transfer with deltas: its dense and its sparse engine over one communicator, on both sides.

An engine of vLLM has one transfer engine for its life, and deltas need two, because pushes of all weights come between
them. Written against the sources of vLLM 0.32 and not run yet: no GPU was at hand.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.distributed.weight_transfer.sparse_nccl_engine import (
    SparseNCCLTrainerWeightTransferEngine,
    SparseNCCLWeightTransferEngine,
    SparseNCCLWeightTransferUpdateInfo,
    SparseWeightPatch,
)

from weight_sync.client import Client
from weight_sync.delta import Delta


class NcclDeltaWeightTransferEngine(NCCLWeightTransferEngine):
    """The worker's side. Weights are replaced by a layer-wise reload; a delta is written into the model in place."""

    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reloading = False

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        """The typed announcement; of a delta it counts the changes of each tensor."""
        if "num_updates_list" in update_dict:
            return SparseNCCLWeightTransferUpdateInfo(**update_dict)
        return super().parse_update_info(update_dict)

    def start_weight_update(self) -> None:
        """Which of the two an update is shows only in its announcement."""
        self._reloading = False

    def receive_weights(self, update_info: Any) -> None:
        """Receive all weights, or a delta."""
        if isinstance(update_info, SparseNCCLWeightTransferUpdateInfo):
            SparseNCCLWeightTransferEngine.receive_weights(self, update_info)
            return
        super().start_weight_update()
        self._reloading = True
        super().receive_weights(update_info)

    def finish_weight_update(self) -> None:
        """Complete the reload, if this was one."""
        reloading, self._reloading = self._reloading, False
        if reloading:
            super().finish_weight_update()


class NcclDeltaTrainer:
    """The sender, around vLLM's dense one. ``delta`` is what the next push sends, unless that is everything."""

    def __init__(self, dense: Any, client: Client) -> None:
        self.delta: Delta | None = None
        self._dense = dense
        self._client: Any = client

    def send_weights(self) -> None:
        """Send everything, or the delta."""
        if self.delta is None:
            self._dense.send_weights()
            return
        sparse = SparseNCCLTrainerWeightTransferEngine(client=self._client)
        sparse.model_update_group = self._dense.model_update_group
        sparse.send_weights(
            SparseWeightPatch(entry.name, positions.to(torch.int32), values, entry.shape)
            for entry, positions, values in self.delta.patches()
        )

    def shutdown(self) -> None:
        self._dense.shutdown()
