"""A two-layer Llama from seeded random weights and a character tokenizer, written as a Hugging Face folder.

The head is tied to the embedding, as in many small models: engines then hold a second, derived copy of the weights
that a weight push must not forget. Written with numpy, so that a run starts without importing torch for it.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np

CHARACTERS = string.ascii_lowercase + string.digits + " .,:;!?+-*/=()#'\"\n"
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
VOCABULARY = (PAD, BOS, EOS, *CHARACTERS)
CONTEXT = 256
SEED = 0
INITIALIZER_RANGE = 0.1
"""Larger than usual, so that the first distribution is not flat and log-probabilities differ from token to token."""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,  # some rows are no character, as in real models; they decode to nothing
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "initializer_range": INITIALIZER_RANGE,
    "dtype": "float32",
}
SPECIAL_IDS = {
    "pad_token_id": VOCABULARY.index(PAD),
    "bos_token_id": VOCABULARY.index(BOS),
    "eos_token_id": VOCABULARY.index(EOS),
}


def build(folder: Path) -> None:
    """Write configuration, float32 weights and tokenizer into the existing ``folder``. The same bytes each time."""
    from safetensors.numpy import save_file

    _write_json(folder / "config.json", CONFIG | SPECIAL_IDS)
    _write_json(folder / "generation_config.json", SPECIAL_IDS)
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)


def _weights() -> dict[str, np.ndarray]:
    """Normal matrices and norms of one, under Hugging Face's names; there is no head, it is the embedding."""
    hidden, inner, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    queries, keys = head * CONFIG["num_attention_heads"], head * CONFIG["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    rng = np.random.default_rng(SEED)
    return {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else (INITIALIZER_RANGE * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def _write_tokenizer(folder: Path) -> None:
    """One token a character; a character that is not in the vocabulary reads as a space."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, BOS, EOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "clean_up_tokenization_spaces": False}
    names |= {"model_max_length": CONTEXT, "tokenizer_class": "PreTrainedTokenizerFast"}
    _write_json(folder / "tokenizer_config.json", names)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
