"""Rollouts into balanced micro-batches: who computes what. Pure.

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
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

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
        return len(self.rollouts[0].prompt_token_ids) + sum(fed_tokens(rollout) for rollout in self.rollouts)

    def work(self, attention_tokens: float) -> float:
        """What the forward pass of the row costs, in tokens of its dense layers; see :func:`plan_micro_batches`."""
        prompt = len(self.rollouts[0].prompt_token_ids)
        attended = prompt**2 + sum(fed * (2 * prompt + fed) for fed in map(fed_tokens, self.rollouts))
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

    def __add__(self, other: BatchPlan) -> BatchPlan:
        """This plan and then another part of the batch."""
        return BatchPlan(
            tuple(mine + theirs for mine, theirs in zip(self.micro_batches, other.micro_batches, strict=True)),
            self.packing,
            self.denominators + other.denominators,
            self.skipped_rollouts + other.skipped_rollouts,
        )

    @property
    def fed_tokens(self) -> int:
        """Tokens of the forward pass over all ranks, padding not counted."""
        return sum(row.length for rank in self.micro_batches for rows in rank for row in rows)

    @property
    def padded_tokens(self) -> int:
        """Tokens of the forward pass over all ranks, padding counted."""
        return sum(_size(rows, self.packing) for rank in self.micro_batches for rows in rank)


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
        limit = min(token_budget, _share_of_a_rank(groups.values(), ranks))
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


def fed_tokens(rollout: TrainRollout) -> int:
    """Response tokens of the forward pass: nothing is predicted from the last one."""
    return max(0, len(rollout.response_token_ids) - 1)


def _share_of_a_rank(groups: Collection[list[TrainRollout]], ranks: int) -> int:
    """Tokens of a prompt and of a rank's share of all responses: a longer row would leave another rank idle."""
    responses = sum(fed_tokens(rollout) for group in groups for rollout in group)
    longest_prompt = max((len(group[0].prompt_token_ids) for group in groups), default=0)
    return longest_prompt + math.ceil(responses / ranks)


def _shared_rows(group: list[TrainRollout], limit: int) -> list[Row]:
    """A group as few rows of about equal length, none of more than ``limit`` tokens unless a single rollout is."""
    prompt = group[0].prompt_token_ids
    if any(rollout.prompt_token_ids != prompt for rollout in group):
        raise ValueError(f"group {group[0].group}: its rollouts differ in their prompt, so they cannot share one")
    room = max(1, limit - len(prompt))
    count = min(len(group), max(1, math.ceil(sum(fed_tokens(rollout) for rollout in group) / room)))
    while True:
        rows = [Row(tuple(share)) for share in _balanced_shares(group, count) if share]
        if count >= len(group) or all(row.length <= limit for row in rows):
            return rows
        count += 1


def _balanced_shares(rollouts: list[TrainRollout], count: int) -> list[list[TrainRollout]]:
    """Longest first, each to the share with the fewest tokens so far."""
    shares: list[list[TrainRollout]] = [[] for _ in range(count)]
    tokens = [0] * count
    for rollout in sorted(rollouts, key=fed_tokens, reverse=True):
        lightest = tokens.index(min(tokens))
        shares[lightest].append(rollout)
        tokens[lightest] += fed_tokens(rollout) + 1
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
