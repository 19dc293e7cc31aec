"""The tensors of a micro-batch: how the rows of :mod:`trainer.batching` are laid out for one forward pass. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.batching import Packing, Row, fed_tokens
from trainer.train_rollout import TrainRollout


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tensors of one forward and backward pass: ``B x L`` tokens with ``T`` response tokens among them.

    ``B`` is 1 with shared prompts, and the number of rows where they are padded.
    """

    input_ids: Tensor
    """``[B, L]`` int64."""
    position_ids: Tensor
    """``[B, L]`` int64."""
    attention_mask: Tensor | None
    """``[B, L]`` bool, false in padding; for padded rows only."""
    segments: Tensor | None
    """``[S, 2]`` int64, as :class:`trainer.packed_attention.Segments` takes it; for shared prompts only."""
    predictor_index: Tensor
    """``[T]`` int64: flat index into ``B * L`` of the hidden state that predicts the token."""
    targets: Tensor
    """``[T]`` int64: the response token ids."""
    behaviour_logprobs: Tensor
    """``[T]`` float32."""
    advantages: Tensor
    """``[T]`` float32."""
    loss_mask: Tensor
    """``[T]`` bool."""
    lags: Tensor
    """``[T]`` int64: the learner's version minus the version that sampled the token."""
    sequence: Tensor
    """``[T]`` int64: number of the token's rollout inside this micro-batch."""
    group: Tensor
    """``[T]`` int64: number of the token's prompt group inside the batch."""
    proximal_logprobs: Tensor | None = None
    """``[T]`` float32, where the rollouts carry it."""
    reference_logprobs: Tensor | None = None
    """``[T]`` float32, where the rollouts carry it."""

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch on another device, but for its segments: they are read on the CPU."""
        columns = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "segments"}
        moved = {name: column.to(device, non_blocking=True) for name, column in columns.items() if column is not None}
        return replace(self, **moved)


def build_micro_batch(rows: Sequence[Row], version: int, packing: Packing) -> MicroBatch:
    """Lay rows out as tensors on the CPU. ``version`` is the learner's policy version.

    No rows give a micro-batch of one token and ``T = 0``.
    """
    lengths = [row.length for row in rows]
    packed = packing == "shared_prompt"
    shape = (1, sum(lengths)) if packed else (len(rows), max(lengths, default=0))
    if not rows:
        shape = (1, 1)
    input_ids, position_ids = np.zeros(math.prod(shape), dtype=np.int64), np.zeros(math.prod(shape), dtype=np.int64)
    predictors: list[np.ndarray] = []
    segments: list[tuple[int, int]] = []
    for number, row in enumerate(rows):
        start = sum(lengths[:number]) if packed else number * shape[1]
        prompt = row.rollouts[0].prompt_token_ids
        end = start + len(prompt)
        last = end - 1
        input_ids[start:end], position_ids[start:end] = prompt, np.arange(len(prompt))
        for rollout in row.rollouts:
            first, end = end, end + fed_tokens(rollout)
            input_ids[first:end] = rollout.response_token_ids[: end - first]
            position_ids[first:end] = len(prompt) + np.arange(end - first)
            predictors.append(np.concatenate([[last], np.arange(first, end)]))
        segments += _segments(row, len(segments))
    padding = np.arange(shape[1]) >= np.asarray(lengths or [0])[:, None]
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids).view(shape),
        position_ids=torch.from_numpy(position_ids).view(shape),
        attention_mask=None if packed else torch.from_numpy(~padding),
        segments=torch.tensor(segments or [(1, 0)]) if packed else None,
        predictor_index=_flat(predictors, torch.int64),
        **token_columns([rollout for row in rows for rollout in row.rollouts], version),
    )


def _segments(row: Row, number: int) -> list[tuple[int, int]]:
    """Length and prompt of each segment of a row, the first of which is segment ``number``."""
    if len(row.rollouts) == 1:
        return [(row.length, number)]
    responses = [(fed_tokens(rollout), number) for rollout in row.rollouts if fed_tokens(rollout)]
    return [(len(row.rollouts[0].prompt_token_ids), number), *responses]


def token_columns(rollouts: Sequence[TrainRollout], version: int) -> dict[str, Any]:
    """The flat response columns ``[T]`` of the rollouts, in order, as :class:`MicroBatch` names them."""
    lengths = [len(rollout.response_token_ids) for rollout in rollouts]
    return {
        "targets": _flat([r.response_token_ids for r in rollouts], torch.int64),
        "behaviour_logprobs": _flat([r.logprobs for r in rollouts], torch.float32),
        "advantages": _flat([np.full(n, r.advantage) for n, r in zip(lengths, rollouts, strict=True)], torch.float32),
        "loss_mask": _flat([r.loss_mask for r in rollouts], torch.bool),
        "lags": version - _flat([r.versions for r in rollouts], torch.int64),
        "sequence": _flat([np.full(n, number) for number, n in enumerate(lengths)], torch.int64),
        "group": _flat([np.full(n, r.group) for n, r in zip(lengths, rollouts, strict=True)], torch.int64),
        "proximal_logprobs": _optional([r.proximal_logprobs for r in rollouts]),
        "reference_logprobs": _optional([r.reference_logprobs for r in rollouts]),
    }


def _optional(parts: Sequence[Sequence[float] | None]) -> Tensor | None:
    """A column that all rollouts have, or none; without rollouts an empty one, which no loss asks in vain for."""
    given = [part for part in parts if part is not None]
    if parts and not given:
        return None
    if len(given) != len(parts):
        raise ValueError("some rollouts of a micro-batch carry log-probabilities of a further policy, others do not")
    return _flat(given, torch.float32)


def _flat(parts: Sequence[Sequence[float] | np.ndarray], dtype: torch.dtype) -> Tensor:
    """The parts one after another, as a tensor."""
    if not parts:
        return torch.zeros(0, dtype=dtype)
    return torch.from_numpy(np.concatenate([np.asarray(part) for part in parts])).to(dtype)
