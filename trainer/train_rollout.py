"""A rollout as the learner sees it, and what a batch of them gains before its first update. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.algorithm.second_moment import second_moment_mask


@dataclass(frozen=True, slots=True)
class TrainRollout:
    """The columns of a finished rollout, its group and its advantage.

    Raises ``ValueError`` when the response columns differ in length or the prompt is empty.
    """

    id: str
    group: int
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    advantage: float
    proximal_logprobs: tuple[float, ...] | None = None
    """Of the policy before the first update on the batch, where ``algorithm.proximal`` asks for it."""
    reference_logprobs: tuple[float, ...] | None = None
    """Of the reference model, where ``algorithm.kl`` asks for it."""

    def __post_init__(self) -> None:
        columns = (self.response_token_ids, self.logprobs, self.versions, self.loss_mask)
        given = [column for column in (self.proximal_logprobs, self.reference_logprobs) if column is not None]
        lengths = {len(column) for column in (*columns, *given)}
        if len(lengths) != 1:
            raise ValueError(f"rollout {self.id}: the response columns differ in length: {sorted(lengths)}")
        if not self.prompt_token_ids:
            raise ValueError(f"rollout {self.id}: the prompt is empty, so nothing predicts the first response token")
        if not math.isfinite(self.advantage):
            raise ValueError(f"rollout {self.id}: the advantage is {self.advantage}")


def split_minibatches(
    rollouts: Sequence[TrainRollout], epochs: int, minibatches: int, seed: str
) -> list[list[TrainRollout]]:
    """The rollouts of each update, in order: ``epochs`` passes over the batch, each in ``minibatches`` parts.

    A part holds whole prompt groups, and as many as any other, or one more. Each pass has another order of the groups,
    which depends on ``seed`` alone, so that all ranks agree. Where the batch has fewer groups than parts, there are as
    many parts as groups.
    """
    groups: dict[int, list[TrainRollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    parts: list[list[TrainRollout]] = []
    count = max(1, min(minibatches, len(groups)))
    for epoch in range(epochs):
        order = list(groups)
        if count > 1:
            random.Random(f"{seed}/{epoch}").shuffle(order)
        parts += [[rollout for number in order[part::count] for rollout in groups[number]] for part in range(count)]
    return parts


def with_proximal(rollouts: Sequence[TrainRollout], logprobs: Tensor) -> list[TrainRollout]:
    """The rollouts with the proximal policy's ``logprobs``, ``[N]`` float over all response tokens, in order."""
    pairs = zip(rollouts, split_tokens(logprobs, rollouts), strict=True)
    return [replace(rollout, proximal_logprobs=tuple(values.tolist())) for rollout, values in pairs]


def with_reference(rollouts: Sequence[TrainRollout], logprobs: Tensor) -> list[TrainRollout]:
    """The rollouts with the reference model's ``logprobs``, ``[N]`` float over all response tokens, in order."""
    pairs = zip(rollouts, split_tokens(logprobs, rollouts), strict=True)
    return [replace(rollout, reference_logprobs=tuple(values.tolist())) for rollout, values in pairs]


def with_second_moment_mask(rollouts: Sequence[TrainRollout], logprobs: Tensor, limit: float) -> list[TrainRollout]:
    """The rollouts, of a whole batch, without the tokens that :func:`second_moment_mask` drops.

    ``logprobs`` ``[N]`` are those of the policy before the first update.
    """
    behaviour = torch.tensor([value for rollout in rollouts for value in rollout.logprobs], dtype=logprobs.dtype)
    lengths = torch.tensor([len(rollout.logprobs) for rollout in rollouts], dtype=torch.int64)
    advantages = torch.tensor([rollout.advantage for rollout in rollouts]).repeat_interleave(lengths)
    mask = torch.tensor([seen for rollout in rollouts for seen in rollout.loss_mask], dtype=torch.bool)
    kept = second_moment_mask(logprobs - behaviour, advantages, mask, limit)
    pairs = zip(rollouts, split_tokens(kept, rollouts), strict=True)
    return [replace(rollout, loss_mask=tuple(values.tolist())) for rollout, values in pairs]


def split_tokens(values: Tensor, rollouts: Sequence[TrainRollout]) -> tuple[Tensor, ...]:
    """``values`` ``[N]`` over all response tokens, cut into one tensor a rollout."""
    return values.split([len(rollout.response_token_ids) for rollout in rollouts]) if rollouts else ()
