"""From scored groups to what the learner trains on: advantages inside each group, one row a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from generator.rollout import Group, ScoredRollout
from trainer.advantages import compute_advantages
from trainer.batching import TrainRollout


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step learns from. ``advantages`` holds one list a group, one number a rollout."""

    groups: tuple[Group, ...]
    advantages: tuple[tuple[float, ...], ...]
    rollouts: tuple[TrainRollout, ...]


def make_batch(groups: Sequence[Group], advantage: str) -> Batch:
    """Compute the advantages (``algorithm.advantage``) and flatten the groups.

    A rollout without a reward has advantage 0 and leaves the loss entirely: it counts in no denominator.
    """
    scored = [(number, rollout) for number, group in enumerate(groups) for rollout in group.rollouts]
    rewards = torch.tensor([float("nan") if r.reward is None else r.reward for _, r in scored], dtype=torch.float64)
    flat = compute_advantages(rewards, torch.tensor([number for number, _ in scored]), advantage).tolist()
    rows = tuple(_row(number, rollout, value) for (number, rollout), value in zip(scored, flat, strict=True))
    values = iter(flat)
    return Batch(tuple(groups), tuple(tuple(next(values) for _ in group.rollouts) for group in groups), rows)


def _row(group: int, scored: ScoredRollout, advantage: float) -> TrainRollout:
    rollout = scored.rollout
    excluded = scored.reward is None
    return TrainRollout(
        id=rollout.id,
        group=group,
        prompt_token_ids=rollout.prompt_token_ids,
        response_token_ids=rollout.response_token_ids,
        logprobs=rollout.logprobs,
        versions=rollout.versions,
        loss_mask=(False,) * len(rollout.loss_mask) if excluded else rollout.loss_mask,
        advantage=advantage,
    )
