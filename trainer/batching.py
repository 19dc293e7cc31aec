"""Rollouts into balanced micro-batches: who computes what, and how it is laid out. Pure.

A *row* is one sequence of the forward pass: a prompt once, then one or more responses to it side by side. Each response
sees the prompt and itself only, and its positions start right after the prompt, so its log-probabilities are those of
the plain sequence prompt + response. The first response token is predicted by the last prompt token, and nothing is
predicted by the last response token, which is therefore never fed.

With ``shared_prompt`` packing a row takes as many responses of a group as the token budget allows, and the rows of a
micro-batch stand one behind the other, without padding; their attention is :mod:`trainer.packed_attention`. With
``padded`` packing a row is one rollout, rows stand below each other, padded to the longest, and any attention will do.
Everything after the forward pass is flat ``[T]`` and the same for both.
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

    def work(self, attention_tokens: float) -> float:
        """What the forward pass of the row costs, in tokens of its dense layers; see :func:`plan_micro_batches`."""
        prompt = len(self.rollouts[0].prompt_token_ids)
        attended = prompt**2 + sum(_fed(rollout) * (2 * prompt + _fed(rollout)) for rollout in self.rollouts)
        return self.length + attended / 2 / attention_tokens


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
        return sum(_size(rows, self.packing) for rank in self.micro_batches for rows in rank)


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
    times the hidden size): ranks get the same work, not the same tokens. The plan is a pure function of its arguments:
    every rank can compute it for itself.

    Raises ``ValueError`` for a budget or rank count below 1, or when rollouts of one group differ in their prompt.
    """
    if token_budget < 1 or ranks < 1:
        raise ValueError(f"token budget ({token_budget}) and ranks ({ranks}) must be at least 1")
    groups: dict[int, list[TrainRollout]] = {}
    for rollout in rollouts:
        if any(rollout.loss_mask) and (feed_all or rollout.advantage != 0.0):
            groups.setdefault(rollout.group, []).append(rollout)
    rows = [Row((rollout,)) for group in groups.values() for rollout in group]
    if packing == "shared_prompt":
        whole = [Row(tuple(group)).length for group in groups.values()]
        limit = min(token_budget, math.ceil(sum(whole) / ranks))  # no rank goes without, where groups are few
        rows = [row for group in groups.values() for row in _shared_rows(group, limit)]
    micro_batches = [_fill(share, token_budget, packing) for share in _balance(rows, ranks, attention_tokens)]
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
            first, end = end, end + _fed(rollout)
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
    responses = [(_fed(rollout), number) for rollout in row.rollouts if _fed(rollout)]
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


def _fed(rollout: TrainRollout) -> int:
    return max(0, len(rollout.response_token_ids) - 1)


def _shared_rows(group: list[TrainRollout], limit: int) -> list[Row]:
    """A group as few rows of about equal length, none of more than ``limit`` tokens unless a single rollout is."""
    prompt = group[0].prompt_token_ids
    if any(rollout.prompt_token_ids != prompt for rollout in group):
        raise ValueError(f"group {group[0].group}: its rollouts differ in their prompt, so they cannot share one")
    room = max(1, limit - len(prompt))
    count = min(len(group), max(1, math.ceil(sum(_fed(rollout) for rollout in group) / room)))
    while True:
        rows = [Row(tuple(share)) for share in _balanced_shares(group, count) if share]
        if count >= len(group) or all(row.length <= limit for row in rows):
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
    for row in sorted(rows, key=lambda row: row.work(attention_tokens), reverse=True):
        lightest = work.index(min(work))
        shares[lightest].append(row)
        work[lightest] += row.work(attention_tokens)
    return [sorted(share, key=lambda row: row.length, reverse=True) for share in shares]


def _fill(rows: list[Row], token_budget: int, packing: Packing) -> list[tuple[Row, ...]]:
    """Rows in descending length into micro-batches within the budget; neighbours in length pad each other least."""
    micro_batches: list[list[Row]] = []
    for row in rows:
        if micro_batches and _size([*micro_batches[-1], row], packing) <= token_budget:
            micro_batches[-1].append(row)
        else:
            micro_batches.append([row])
    return [tuple(micro_batch) for micro_batch in micro_batches]


def _size(rows: Sequence[Row], packing: Packing) -> int:
    """Tokens of a micro-batch's forward pass, padding counted."""
    lengths = [row.length for row in rows]
    return sum(lengths) if packing == "shared_prompt" else len(rows) * max(lengths, default=0)
