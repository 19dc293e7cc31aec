"""Rollouts into balanced micro-batches: who computes what, and how it is laid out. Pure.

A *row* is one sequence of the forward pass: a prompt once, then one or more responses to it side by side. Each response
sees the prompt and itself only, and its positions start right after the prompt, so its log-probabilities are those of
the plain sequence prompt + response. The first response token is predicted by the last prompt token, and nothing is
predicted by the last response token, which is therefore never fed.

With ``shared_prompt`` packing a row takes as many responses of a group as pay off; with ``padded`` packing a row is one
rollout. Everything after the forward pass is flat ``[T]`` and the same for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trainer.algorithm.aggregation import Denominators
from trainer.train_rollout import TrainRollout

Packing = Literal["shared_prompt", "padded"]
"""How rows are made, see above; the words that ``learner.packing`` takes."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of the forward pass: a prompt and responses to it."""

    rollouts: tuple[TrainRollout, ...]

    @property
    def length(self) -> int:
        """Tokens fed: the prompt once, and every response but for its last token."""
        return len(self.rollouts[0].prompt_token_ids) + sum(_fed(rollout) for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Which rows run in which micro-batch on which rank. ``micro_batches[rank][i]`` is a tuple of rows; every rank has
    the same number of micro-batches, at least one; an empty one takes part in collectives with zero loss."""

    micro_batches: tuple[tuple[tuple[Row, ...], ...], ...]
    packing: Packing
    denominators: Denominators
    """Counted over *all* rollouts after all masks, those left out of the forward pass included."""
    skipped_rollouts: int
    """Rollouts left out of the forward pass because their loss contribution is exactly zero."""

    @property
    def fed_tokens(self) -> int:
        """Tokens of the forward pass over all ranks, padding not counted."""
        return sum(row.length for rank in self.micro_batches for rows in rank for row in rows)

    @property
    def padded_tokens(self) -> int:
        """Tokens of the forward pass over all ranks, padding counted."""
        return sum(_padded_tokens(rows) for rank in self.micro_batches for rows in rank)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tensors of one forward and backward pass. ``B`` rows of ``L`` tokens hold ``T`` response tokens."""

    input_ids: Tensor
    """``[B, L]`` int64."""
    position_ids: Tensor
    """``[B, L]`` int64."""
    attention_mask: Tensor
    """Bool, true where attended: ``[B, 1, L, L]`` for shared prompts, ``[B, L]`` for padded rows."""
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
        """The same micro-batch on another device."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: column.to(device, non_blocking=True) for name, column in columns.items() if column is not None}
        return replace(self, **moved)


def plan_micro_batches(
    rollouts: Sequence[TrainRollout],
    token_budget: int,
    ranks: int,
    packing: Packing,
    attention_tokens: float = math.inf,
    feed_all: bool = False,
) -> BatchPlan:
    """Distribute a batch over ``ranks`` and micro-batches of at most ``token_budget`` tokens, padding counted.

    Rollouts that cannot change the loss are left out: those without a token that it sees and, unless ``feed_all``,
    those with advantage 0. A row longer than the budget cannot be split and gets a micro-batch of its own.
    ``attention_tokens`` is the context length at which attending to it costs as much as the dense layers do (about six
    times the hidden size); it decides how many responses share a row, because attention over a long row costs more than
    the prompt that it saves. The plan is a pure function of its arguments: every rank can compute it for itself.

    Raises ``ValueError`` for a budget or rank count below 1, or when rollouts of one group differ in their prompt.
    """
    if token_budget < 1 or ranks < 1:
        raise ValueError(f"token budget ({token_budget}) and ranks ({ranks}) must be at least 1")
    groups: dict[int, list[TrainRollout]] = {}
    for rollout in rollouts:
        if any(rollout.loss_mask) and (feed_all or rollout.advantage != 0.0):
            groups.setdefault(rollout.group, []).append(rollout)
    rows: list[Row] = []
    for group in groups.values():
        rows += _shared_rows(group, token_budget, attention_tokens) if packing == "shared_prompt" else _single(group)
    micro_batches = [_fill(share, token_budget) for share in _balance(rows, ranks, attention_tokens)]
    prompt_tokens = [0] * (1 + max((rollout.group for rollout in rollouts), default=-1))
    for rollout in rollouts:
        prompt_tokens[rollout.group] += sum(rollout.loss_mask)
    count = max(1, *(len(share) for share in micro_batches))
    return BatchPlan(
        tuple(tuple(share) + ((),) * (count - len(share)) for share in micro_batches),
        packing,
        Denominators(
            tokens=sum(prompt_tokens),
            sequences=sum(any(rollout.loss_mask) for rollout in rollouts),
            prompt_tokens=tuple(prompt_tokens),
        ),
        skipped_rollouts=len(rollouts) - sum(len(group) for group in groups.values()),
    )


def build_micro_batch(rows: Sequence[Row], version: int, packing: Packing) -> MicroBatch:
    """Lay rows out as tensors on the CPU. ``version`` is the learner's policy version.

    No rows give a micro-batch of one unattended token and ``T = 0``.
    """
    batch, length = max(1, len(rows)), max([1, *(row.length for row in rows)])
    input_ids = np.zeros((batch, length), dtype=np.int64)
    position_ids = np.zeros((batch, length), dtype=np.int64)
    segment = np.full((batch, length), _PADDING, dtype=np.int64)
    predictors: list[np.ndarray] = []
    for b, row in enumerate(rows):
        prompt = row.rollouts[0].prompt_token_ids
        end = len(prompt)
        input_ids[b, :end], position_ids[b, :end], segment[b, :end] = prompt, np.arange(end), _PROMPT
        for number, rollout in enumerate(row.rollouts):
            fed, start = _fed(rollout), end
            end += fed
            input_ids[b, start:end] = rollout.response_token_ids[:fed]
            position_ids[b, start:end] = len(prompt) + np.arange(fed)
            segment[b, start:end] = _PROMPT + 1 + number
            predictors.append(b * length + np.concatenate([[len(prompt) - 1], np.arange(start, end)]))
    attended = torch.from_numpy(segment)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        attention_mask=_shared_prompt_mask(attended) if packing == "shared_prompt" else attended != _PADDING,
        predictor_index=_flat(predictors, torch.int64),
        **token_columns([rollout for row in rows for rollout in row.rollouts], version),
    )


_PADDING, _PROMPT = -1, 0


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


def _shared_prompt_mask(segment: Tensor) -> Tensor:
    """``[B, 1, L, L]`` bool from segment numbers ``[B, L]``: causal, and across segments only to the prompt.

    A padding position attends to itself and the padding before it: a query without any key would be NaN.
    """
    length = segment.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    query, key = segment[:, :, None], segment[:, None, :]
    return (causal & ((query == key) | ((key == _PROMPT) & (query != _PADDING))))[:, None]


def _fed(rollout: TrainRollout) -> int:
    return max(0, len(rollout.response_token_ids) - 1)


def _single(group: list[TrainRollout]) -> list[Row]:
    return [Row((rollout,)) for rollout in group]


def _shared_rows(group: list[TrainRollout], token_budget: int, attention_tokens: float) -> list[Row]:
    """A group as few rows of about equal length, none over the budget unless a single rollout is.

    With a prompt of ``P`` tokens, ``s`` response tokens a row, and attention as dear as the dense layers at ``A``
    tokens, a response token costs ``(P + s) (1 + (P + s) / A) / s``, which is least at ``s = sqrt(P (P + A))``.
    """
    prompt = group[0].prompt_token_ids
    if any(rollout.prompt_token_ids != prompt for rollout in group):
        raise ValueError(f"group {group[0].group}: its rollouts differ in their prompt, so they cannot share one")
    total = sum(_fed(rollout) for rollout in group)
    best = math.sqrt(len(prompt) * (len(prompt) + attention_tokens))
    room = max(1, token_budget - len(prompt))
    count = min(len(group), max(1, round(total / best), math.ceil(total / room)))
    while True:
        rows = [Row(tuple(share)) for share in _balanced_shares(group, count) if share]
        if count >= len(group) or all(row.length <= token_budget for row in rows):
            return rows
        count += 1


def _balanced_shares(rollouts: list[TrainRollout], count: int) -> list[list[TrainRollout]]:
    """Longest first, each to the share with the fewest tokens so far."""
    shares: list[list[TrainRollout]] = [[] for _ in range(count)]
    tokens = [0] * count
    for rollout in sorted(rollouts, key=_fed, reverse=True):
        lightest = tokens.index(min(tokens))
        shares[lightest].append(rollout)
        tokens[lightest] += _fed(rollout) + 1
    return shares


def _balance(rows: list[Row], ranks: int, attention_tokens: float) -> list[list[Row]]:
    """Rows over ranks, dearest first, each to the rank with the least work so far; in descending length in each."""
    shares: list[list[Row]] = [[] for _ in range(ranks)]
    work = [0.0] * ranks
    for row in sorted(rows, key=lambda row: row.length, reverse=True):
        lightest = work.index(min(work))
        shares[lightest].append(row)
        # Dense layers cost the length, attention its square: both times attention_tokens, which may be 0.
        attends = math.isfinite(attention_tokens)
        work[lightest] += row.length * (attention_tokens + row.length) if attends else row.length
    return shares


def _fill(rows: list[Row], token_budget: int) -> list[tuple[Row, ...]]:
    """Rows in descending length into micro-batches within the budget; neighbours in length pad each other least."""
    micro_batches: list[list[Row]] = []
    for row in rows:
        if micro_batches and (len(micro_batches[-1]) + 1) * micro_batches[-1][0].length <= token_budget:
            micro_batches[-1].append(row)
        else:
            micro_batches.append([row])
    return [tuple(micro_batch) for micro_batch in micro_batches]


def _padded_tokens(rows: Sequence[Row]) -> int:
    return len(rows) * max((row.length for row in rows), default=0)
