"""Weight transfer through the memory of one GPU that learner and engine share: vLLM's ``ipc`` engine, unmodified.

The learner packs tensors into one buffer; the engine's worker maps that buffer and copies out of it. Nothing travels
but the buffer's handle, once a bucket, and the answer.
"""

from __future__ import annotations

import base64
import pickle
from typing import Any

from weight_sync.client import Client, UpdatePayload
from weight_sync.manifest import Manifest


class HandleClient:
    """A :class:`weight_sync.client.Client` that sends the handles of GPU memory as text.

    They are tuples of classes, sizes and bytes: what vLLM passes between its processes would not bring them across.
    Workers take the text only with ``VLLM_ALLOW_INSECURE_SERIALIZATION=1``, because reading it runs pickle.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Only what vLLM's workers of this engine know: they join no group, so there is no rank."""
        self._client.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self._client.start_weight_update()

    def update_weights(self, update_info: UpdatePayload) -> None:
        assert isinstance(update_info, dict)
        handles = update_info["ipc_handles"]
        text = base64.b64encode(pickle.dumps(handles)).decode("ascii")
        self._client.update_weights({**update_info, "ipc_handles": None, "ipc_handles_pickled": text})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._client.finish_weight_update(weight_version)


def buffer_bytes(manifest: Manifest, bucket_bytes: int) -> int:
    """The size of the shared buffer: a bucket, and room for the largest tensor, which vLLM does not split."""
    return max(bucket_bytes, *(entry.bytes for entry in manifest.entries))
