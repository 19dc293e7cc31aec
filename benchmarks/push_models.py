"""The models whose weights the benchmark pushes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.tiny import tiny_llama

NAMES = ("smollm2", "random")
"""What is measured: SmolLM2-135M-Instruct, and a Llama of 500 million random parameters."""
TINY = "tiny"
"""What ``--quick`` measures: two layers, tied."""


def load(name: str, folder: Path | None, dtype: torch.dtype) -> Any:
    """The model of that name, in ``dtype``; SmolLM2 from ``folder``, or from where runs find it."""
    if name == TINY:
        return tiny_llama(1).to(dtype)
    if name == "random":
        return random_llama().to(dtype)
    from transformers import AutoModelForCausalLM

    if folder is None:
        from trainer.model import embedded_model

        folder = embedded_model()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def random_llama() -> Any:
    """About 500 million random parameters in 18 layers, head tied; bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=18,
        num_attention_heads=24,
        num_key_value_heads=8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    return LlamaForCausalLM(config).bfloat16().eval()


def save(model: Any, folder: Path) -> None:
    """What an engine reads: the configuration. Engines start with random weights, so none are written."""
    model.config.dtype = next(model.parameters()).dtype
    model.config.save_pretrained(folder)
