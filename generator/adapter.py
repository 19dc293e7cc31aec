"""A low-rank adapter beside the weights of a running vLLM: every request has to name it, as a LoRA request."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generator.link import EngineError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from weight_sync.adapter_files import AdapterFiles

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM has room for; an adapter of another one takes the room of the next."""
ADAPTER_ID = 1
"""There is one adapter at a time, and each version takes the place of the one before."""
SHOWN_LAYERS = 4
"""Of those that an error is about."""


def engine_arguments(rank: int, targets: Sequence[str]) -> dict[str, Any]:
    """What vLLM is started with to compute with one adapter of ``rank`` for ``targets``, in the dtype of the model.

    Told none, vLLM 0.32 makes room in the output head as well, and on CPU fails at the first log-probability of a
    prompt: it multiplies all its tokens with the adapters of the sampled ones (``PunicaWrapperCPU.add_lora_logits``).
    """
    room = next(room for room in RANKS if room >= rank)
    return {
        "enable_lora": True,
        "max_lora_rank": room,
        "lora_target_modules": list(targets),
        "max_loras": 1,
        "max_cpu_loras": 1,
    }


async def load_adapter(llm: AsyncLLM, version: int, files: AdapterFiles) -> Any:
    """Have vLLM compute with this adapter instead of the one before; the LoRA request that requests are to carry.

    vLLM reads adapters from files only. They are gone when this returns: what lost the adapter later would not find
    older ones, but fail. vLLM keys its prefix cache by the adapter's name, so every version has a name of its own.

    Raises :class:`EngineError` with the layers that a worker has no room for: vLLM takes such an adapter, and leaves
    them out.
    """
    from vllm.lora.request import LoRARequest

    with tempfile.TemporaryDirectory(prefix="midflight-adapter-") as folder:
        await asyncio.to_thread(_write, Path(folder), files)
        name = f"version {version}"
        if not await llm.add_lora(LoRARequest(name, ADAPTER_ID, folder, load_inplace=True)):
            raise EngineError(f"vLLM did not take the adapter of version {version}")
        await _check_applied(llm, version)
        return LoRARequest(name, ADAPTER_ID, folder)


async def _check_applied(llm: AsyncLLM, version: int) -> None:
    of_workers = await llm.collective_rpc("adapter_layers_left_out", args=(ADAPTER_ID,))
    if left_out := sorted({layer for layers in of_workers for layer in layers}):
        shown = ", ".join(left_out[:SHOWN_LAYERS]) + (", ..." if len(left_out) > SHOWN_LAYERS else "")
        raise EngineError(
            f"vLLM computes without {len(left_out)} layer(s) of the adapter of version {version}, for which it made no "
            f"room when it started: {shown}; leave them out of learner.lora.targets, or use weight_sync.lora=merged"
        )


def _write(folder: Path, files: AdapterFiles) -> None:
    (folder / "adapter_config.json").write_text(files.config, encoding="utf-8")
    (folder / "adapter_model.safetensors").write_bytes(files.weights)
