"""How large a model is, read from the files of its folder without loading it."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generator.task import ModelError

OTHER_CACHES = ("kv_lora_rank", "attn_layer_period", "full_attention_interval", "hybrid_override_pattern")
"""Keys of models whose layers keep something else, or less, than keys and values of every token."""
LONGEST_HEADER = 100 << 20
"""Bytes: the format's own limit."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What an estimate of memory needs to know; ``None``: the files do not say, or the layers are of another kind."""

    parameters: int | None
    """Elements of the weights in the folder; a tied head counts once."""
    layers: int | None = None
    key_value_heads: int | None = None
    head_size: int | None = None

    def kv_bytes(self, width: int, workers: int) -> int | None:
        """Bytes of the KV cache that a token takes in each of an engine's ``workers``, in elements of ``width`` bytes.

        Heads are shared out among workers; where there are fewer, they are repeated.
        """
        if self.layers is None or self.key_value_heads is None or self.head_size is None:
            return None
        return 2 * self.layers * max(1, self.key_value_heads // workers) * self.head_size * width


def model_size(folder: Path) -> ModelSize:
    """The size of the model in ``folder``. Raises :class:`ModelError` for a file of weights that is not whole."""
    configuration = _object(folder / "config.json")
    text = configuration.get("text_config", configuration)
    text = text if isinstance(text, dict) else {}
    parameters = _parameters(folder)
    heads, hidden = _count(text, "num_attention_heads"), _count(text, "hidden_size")
    if any(text.get(key) for key in OTHER_CACHES) or _has_other_layers(text):
        return ModelSize(parameters)
    head_size = _count(text, "head_dim") or (hidden // heads if hidden and heads else None)
    return ModelSize(
        parameters, _count(text, "num_hidden_layers"), _count(text, "num_key_value_heads") or heads, head_size
    )


def _has_other_layers(text: dict[str, Any]) -> bool:
    """Whether some layers see a window only, or are no attention."""
    types = text.get("layer_types")
    if isinstance(types, list):
        return any(kind != "full_attention" for kind in types)
    return bool(text.get("sliding_window")) and text.get("use_sliding_window", True) is not False


def _parameters(folder: Path) -> int | None:
    index = _object(folder / "model.safetensors.index.json").get("weight_map")
    named = sorted(set(map(str, index.values()))) if isinstance(index, dict) else []
    files = [folder / name for name in named]
    # Some folders hold the weights twice, for another library in `consolidated.safetensors`.
    files = files or sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    return sum(map(_elements, files)) if files else None


def _elements(path: Path) -> int:
    """The elements of a safetensors file by its header: a length in 8 bytes, then JSON with a shape for each tensor."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(LONGEST_HEADER, size):
                raise ModelError(f"{path} is no safetensors file, or only the beginning of one ({size} bytes)")
            header = json.loads(file.read(length))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors), default=0)
        elements = sum(math.prod(entry["shape"]) for entry in tensors)
    except ModelError:
        raise
    except (OSError, ValueError, struct.error, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ModelError(f"{path} cannot be read as a safetensors file: {error}") from error
    if size < end:
        raise ModelError(f"{path} is not whole: it has {size} bytes of {end}; fetch or copy it again")
    return elements


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _count(text: dict[str, Any], key: str) -> int | None:
    value = text.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
