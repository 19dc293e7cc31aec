"""From scored groups to what the learner trains on: advantages inside each group, one row a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from generator.rollout import Group, ScoredRollout
from trainer.advantages import compute_advantages
from trainer.batching import TrainRollout


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step learns from. ``advantages`` holds one list a group, one number a rollout."""

    groups: tuple[Group, ...]
    """The groups as they are learned from: the loss sees no token of a rollout without a reward."""
    advantages: tuple[tuple[float, ...], ...]
    rollouts: tuple[TrainRollout, ...]

    @property
    def unscored_tokens(self) -> int:
        """Sampled tokens of the rollouts without a reward."""
        scored = (rollout for group in self.groups for rollout in group.rollouts)
        return sum(s.rollout.sampled_tokens for s in scored if s.reward is None)


def make_batch(groups: Sequence[Group], advantage: str) -> Batch:
    """Compute the advantages (``algorithm.advantage``) and flatten the groups.

    A rollout without a reward has advantage 0 and leaves the loss entirely: it counts in no denominator.
    """
    groups = [replace(group, rollouts=tuple(_masked(scored) for scored in group.rollouts)) for group in groups]
    scored = [(number, rollout) for number, group in enumerate(groups) for rollout in group.rollouts]
    rewards = torch.tensor([float("nan") if r.reward is None else r.reward for _, r in scored], dtype=torch.float64)
    flat = compute_advantages(rewards, torch.tensor([number for number, _ in scored]), advantage).tolist()
    rows = tuple(_row(number, rollout, value) for (number, rollout), value in zip(scored, flat, strict=True))
    values = iter(flat)
    return Batch(tuple(groups), tuple(tuple(next(values) for _ in group.rollouts) for group in groups), rows)


def _masked(scored: ScoredRollout) -> ScoredRollout:
    if scored.reward is not None:
        return scored
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
