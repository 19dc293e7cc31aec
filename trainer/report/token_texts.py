"""The text of each token of a response, where the run's tokenizer can be found."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

TokenTexts = Callable[[Sequence[int]], list[str]]
"""From token ids to as many pieces of text, which together are the text. A token that ends in the middle of a character
has an empty piece, and the one that completes it the whole character."""

FILE = "tokenizer.json"


def find_tokenizer(run: Path, config: Mapping[str, Any]) -> TokenTexts | None:
    """The tokenizer of a run: that of its export, else of the model that it started from, if either is still there."""
    folders = [run / "export", config.get("model_folder")]
    model = config.get("model")
    folders.append(model.get("path") if isinstance(model, dict) else None)
    for folder in folders:
        if isinstance(folder, (str, os.PathLike)) and (Path(folder) / FILE).is_file():
            try:
                return token_texts(Tokenizer.from_file(str(Path(folder) / FILE)))
            except Exception:  # `tokenizers` raises plain Exception for a file that it cannot read
                continue
    return None


def token_texts(tokenizer: Tokenizer) -> TokenTexts:
    """Pieces by ``tokenizer``, special tokens included, because a model samples them too."""

    def texts(token_ids: Sequence[int]) -> list[str]:
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(tokenizer, token_id) or "" for token_id in token_ids]

    return texts
