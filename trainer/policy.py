"""The policy: a causal language model that answers with log-probabilities instead of logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.logprobs import chunked_logprobs
from trainer.model import SCALED_LOGITS
from trainer.packed_attention import Segments


class PolicyModel(torch.nn.Module):
    """Wraps a causal language model of transformers, kept as attribute ``model``.

    The base model runs without its head; log-probabilities and entropy come from its last hidden states, a chunk of
    response tokens at a time. Raises ``ValueError`` for a model whose head is more than one linear layer.
    """

    def __init__(self, model: Any, temperature: float, chunk: int, entropy_gradient: bool = False) -> None:
        super().__init__()
        for name in SCALED_LOGITS:  # where the folder's own config.json says so, it was refused before
            if getattr(model.config, name, None) not in (None, 1, 1.0):
                raise ValueError(
                    f"model type {model.config.model_type!r} has {name}={getattr(model.config, name)}: its logits are "
                    "not a plain linear layer over the hidden states, which the learner does not support"
                )
        self.model = model
        self.temperature = temperature
        self.chunk = chunk
        self.entropy_gradient = entropy_gradient

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        predictor_index: Tensor,
        targets: Tensor,
        temperature: float | None = None,
        segments: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each target, both ``[T]`` float32.

        ``input_ids`` and ``position_ids`` are ``[B, L]`` int64, ``attention_mask`` is ``[B, L]`` bool or none.
        ``predictor_index`` ``[T]`` int64 points into the flattened ``B * L`` hidden states. ``temperature`` overrides
        the policy's own. ``segments`` ``[S, 2]`` int64 says what attends to what in a packed row, for a model whose
        attention is :func:`trainer.packed_attention.packed_attention`. The entropy carries a gradient where the policy
        was made with ``entropy_gradient``.
        """
        packed = {} if segments is None else {"segments": Segments(segments)}
        output = self.model.base_model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False, **packed
        )
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, predictor_index)
        head = self.model.get_output_embeddings()
        return chunked_logprobs(
            hidden,
            head.weight,
            getattr(head, "bias", None),
            targets,
            self.temperature if temperature is None else temperature,
            self.chunk,
            self.entropy_gradient,
        )
