"""From scored groups to what the learner trains on: advantages inside each group, one row a rollout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from generator.rollout import Group, ScoredRollout
from trainer.algorithm.advantages import compute_advantages
from trainer.algorithm.filters import keep_group, overlong_penalty
from trainer.train_rollout import TrainRollout

if TYPE_CHECKING:
    from trainer.config import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step learns from. ``advantages`` holds one list a group, one number a rollout."""

    groups: tuple[Group, ...]
    """The groups as they are learned from: the loss sees no token of a rollout without a reward, or filtered out."""
    advantages: tuple[tuple[float, ...], ...]
    rollouts: tuple[TrainRollout, ...]
    filtered: dict[str, float]
    """Metrics of the filters that are on."""

    @property
    def unscored_tokens(self) -> int:
        """Sampled tokens of the rollouts without a reward."""
        scored = (rollout for group in self.groups for rollout in group.rollouts)
        return sum(s.rollout.sampled_tokens for s in scored if s.reward is None)


def make_batch(
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    max_tokens: int,
    kl_penalties: Sequence[float] | None = None,
    first: int = 0,
) -> Batch:
    """Filter, compute the advantages (``algorithm.advantage``) and flatten the groups.

    A rollout without a reward has advantage 0 and leaves the loss entirely: it counts in no denominator. So does what
    ``algorithm.filter`` takes out. ``max_tokens`` is the response budget of a rollout. ``kl_penalties``, one number a
    rollout, are subtracted from the rewards before anything else looks at them. ``first`` is the number of the first
    group in the batch, of which these groups may be a part.
    """
    filters = algorithm.filter
    everyone = [rollout for group in groups for rollout in group.rollouts]
    number = torch.tensor([n for n, group in enumerate(groups) for _ in group.rollouts], dtype=torch.int64)
    rewards = torch.tensor([math.nan if r.reward is None else r.reward for r in everyone], dtype=torch.float64)
    counts: dict[str, float] = {}
    seen = ~torch.isnan(rewards)
    if kl_penalties is not None:
        penalties = torch.tensor(kl_penalties, dtype=torch.float64)
        rewards = rewards - penalties
        counts["policy/kl_penalty_mean"] = penalties[seen].mean().item() if bool(seen.any()) else 0.0
    if filters.overlong == "penalty":
        lengths = torch.tensor([r.rollout.sampled_tokens for r in everyone])
        penalty = overlong_penalty(
            lengths, max_tokens, filters.overlong_buffer or max(1, max_tokens // 5), filters.overlong_penalty
        )
        rewards = rewards + penalty
        counts["filter/overlong_penalty_mean"] = -penalty.mean().item()
    if filters.overlong == "mask":
        overlong = torch.tensor([r.rollout.finish_reason == "length" for r in everyone], dtype=torch.bool)
        counts["filter/overlong_rollouts"] = (seen & overlong).sum().item()
        seen = seen & ~overlong
    if filters.zero_variance:
        kept = torch.tensor([keep_group(rewards[number == n].tolist()) for n in range(len(groups))])[number]
        counts["filter/zero_variance_rollouts"] = (seen & ~kept).sum().item()
        seen = seen & kept
    values = compute_advantages(rewards, number, algorithm.advantage)
    # What the loss does not see is not fed either.
    flat, flags = torch.where(seen, values, 0.0).tolist(), iter(seen.tolist())
    groups = [replace(g, rollouts=tuple(r if next(flags) else _masked(r) for r in g.rollouts)) for g in groups]
    advantages = iter(flat)
    by_group = tuple(tuple(next(advantages) for _ in group.rollouts) for group in groups)
    return Batch(tuple(groups), by_group, train_rollouts(groups, by_group, first), counts)


def train_rollouts(
    groups: Sequence[Group], advantages: Sequence[Sequence[float]] | None = None, first: int = 0
) -> tuple[TrainRollout, ...]:
    """The rollouts of all groups as the learner sees them, groups numbered from ``first``.

    ``advantages`` has the shape of the groups; none: all 0.
    """
    return tuple(
        _row(first + n, rollout, 0.0 if advantages is None else advantages[n][member])
        for n, group in enumerate(groups)
        for member, rollout in enumerate(group.rollouts)
    )


def _masked(scored: ScoredRollout) -> ScoredRollout:
    rollout = scored.rollout
    return replace(scored, rollout=replace(rollout, loss_mask=(False,) * len(rollout.loss_mask)))


def _row(group: int, scored: ScoredRollout, advantage: float) -> TrainRollout:
    rollout = scored.rollout
    return TrainRollout(
        id=rollout.id,
        group=group,
        prompt_token_ids=rollout.prompt_token_ids,
        response_token_ids=rollout.response_token_ids,
        logprobs=rollout.logprobs,
        versions=rollout.versions,
        loss_mask=rollout.loss_mask,
        advantage=advantage,
    )
