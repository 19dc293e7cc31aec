"""Attention over a packed micro-batch: all its tokens in one row, no padding, and every segment for itself.

A *segment* is a prompt, a response, or a plain sequence of both. Its tokens attend causally to the segment and, where
it is a response, to its whole prompt, which stands in the row once however many responses follow. On a GPU in half
precision this is one call of PyTorch's flash attention for variable lengths; elsewhere one call a segment.

``packed_attention`` has the signature of an attention function of transformers (``AttentionInterface``), which models
call in each layer; :class:`Segments` reaches it through the keyword arguments of the model. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

NAME = "midflight_packed"
"""What the attention is called in a model's configuration."""

UNSUPPORTED = {"softcap": "caps attention scores", "s_aux": "has attention sinks", "position_bias": "biases positions"}
"""Arguments of attention that this one does not have, by what a model with them does."""


class Segments:
    """The segments of a row of ``T`` tokens, in order, from ``[S, 2]`` int64: length, and the number of its prompt.

    A segment that is its own prompt attends to itself alone. Prepared once a forward pass and used by every layer.
    """

    def __init__(self, table: Tensor) -> None:
        rows = table.tolist()
        self.lengths = [int(length) for length, _ in rows]
        self.prompts = [int(prompt) for _, prompt in rows]
        self._masks: dict[tuple[int, int, int], Tensor] = {}

    def shares_prompt(self, number: int) -> bool:
        """Whether a segment attends to another one, its prompt."""
        return self.prompts[number] != number

    def keys(self, number: int) -> int:
        """How many keys the last token of a segment attends to."""
        prompt = self.lengths[self.prompts[number]] if self.shares_prompt(number) else 0
        return prompt + self.lengths[number]

    def mask(self, number: int, window: int | None, like: Tensor) -> Tensor | None:
        """What to add to the scores of a segment, ``[queries, keys]``; none where plain causal attention is meant.

        ``window`` is how many keys a token sees at most, itself included; ``like`` gives dtype and device.
        """
        queries, keys = self.lengths[number], self.keys(number)
        window = keys if window is None else min(window, keys)
        if queries == keys == window:
            return None
        if (queries, keys, window) not in self._masks:
            behind = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
            hidden = ((behind < 0) | (behind >= window)).to(like.device)
            self._masks[queries, keys, window] = like.new_zeros(queries, keys).masked_fill_(hidden, -torch.inf)
        return self._masks[queries, keys, window]

    def key_index(self) -> Tensor:
        """``[K]`` int64: the tokens that the segments attend to, segment after segment."""
        ends = list(itertools.accumulate(self.lengths))
        tokens = [torch.arange(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]
        parts = []
        for number, own in enumerate(tokens):
            parts += [tokens[self.prompts[number]], own] if self.shares_prompt(number) else [own]
        return torch.cat(parts)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of ``query`` ``[1, heads, T, D]`` over ``key`` and ``value`` ``[1, key heads, T, D]``.

    Returns ``[1, T, heads, D]`` and no weights. Raises ``ValueError`` for a model that does not pass on its keyword
    arguments, or whose attention has more to it than this one.
    """
    if segments is None:
        raise ValueError(f"{type(module).__name__} gets no segments of a packed row; use learner.packing=padded")
    for name in UNSUPPORTED.keys() & {name for name, given in others.items() if given is not None}:
        raise ValueError(f"{type(module).__name__} {UNSUPPORTED[name]}, packed rows do not; use learner.packing=padded")
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _in_one_call(query, key, value, segments, scaling, sliding_window)[None], None
    return _by_segment(query, key, value, segments, scaling, sliding_window).transpose(1, 2).contiguous(), None


def _by_segment(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, window: int | None
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    # Split and joined, not sliced: the gradient of a slice is a row of zeros as long as the whole.
    queries = query.split(segments.lengths, dim=2)
    keys, values = (
        (part.repeat_interleave(groups, dim=1) if groups > 1 else part).split(segments.lengths, dim=2)
        for part in (key, value)
    )
    outputs = []
    for number, own in enumerate(queries):
        prompt = segments.prompts[number]
        seen_keys, seen_values = keys[number], values[number]
        if segments.shares_prompt(number):
            seen_keys = torch.cat([keys[prompt], seen_keys], dim=2)
            seen_values = torch.cat([values[prompt], seen_values], dim=2)
        mask = segments.mask(number, window, query)
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                own, seen_keys, seen_values, attn_mask=mask, is_causal=mask is None, scale=scaling
            )
        )
    return torch.cat(outputs, dim=2)


def _in_one_call(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, window: int | None
) -> Tensor:
    """``[T, heads, D]`` by flash attention, which aligns the last query of a sequence with its last key."""
    from torch.nn.attention.varlen import varlen_attn

    numbers: Sequence[int] = range(len(segments.lengths))
    key_lengths = [segments.keys(number) for number in numbers]
    if any(segments.shares_prompt(number) for number in numbers):
        index = segments.key_index().to(query.device)
        key, value = key.index_select(2, index), value.index_select(2, index)
    output = varlen_attn(
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1).contiguous(),
        value[0].transpose(0, 1).contiguous(),
        _offsets(segments.lengths, query.device),
        _offsets(key_lengths, query.device),
        max(segments.lengths),
        max(key_lengths),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)  # and not a pair: nothing but the output was asked for
    return output


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    """``[N + 1]`` int32: where each sequence begins, and the end."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
