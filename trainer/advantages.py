"""Advantages: how much better a rollout was than its prompt group. Pure tensor functions.

A rollout whose reward is ``NaN`` is excluded: it gets advantage 0 and does not count in its group's statistics. A group
with fewer than two scored rollouts, or whose scored rewards are all equal, carries no signal: its advantages are
exactly 0, whatever rounding would make of ``reward - mean``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to the group deviation, in units of reward."""


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Per rollout, the statistics of its group over the scored rollouts. All ``[R]`` float64."""

    rewards: Tensor
    count: Tensor
    mean: Tensor
    std: Tensor
    """Unbiased (divided by ``count - 1``); 0 for a group of one."""


def grpo(stats: GroupStatistics) -> Tensor:
    """``(r - mean) / (std + 1e-6)`` with the unbiased deviation. DeepSeekMath (arXiv:2402.03300)."""
    return (stats.rewards - stats.mean) / (stats.std + STD_EPSILON)


def dr_grpo(stats: GroupStatistics) -> Tensor:
    """``r - mean``: no division by the deviation. Dr. GRPO (arXiv:2503.20783)."""
    return stats.rewards - stats.mean


def rloo(stats: GroupStatistics) -> Tensor:
    """``r`` minus the mean of the *other* rollouts, ``n / (n - 1) * (r - mean)``. RLOO (arXiv:2402.14740)."""
    return stats.count / (stats.count - 1).clamp(min=1) * (stats.rewards - stats.mean)


ADVANTAGES: dict[str, Callable[[GroupStatistics], Tensor]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
"""The advantage estimators, by the name that ``algorithm.advantage`` takes."""


def compute_advantages(rewards: Tensor, group_index: Tensor, name: str) -> Tensor:
    """Advantages ``[R]`` (dtype of ``rewards``), computed in float64.

    ``rewards`` is ``[R]`` float, ``NaN`` for an excluded rollout. ``group_index`` is ``[R]`` int64: rollouts with the
    same index are one prompt group; indices need be neither dense nor sorted.

    Raises ``ValueError`` for a shape mismatch or an infinite reward.
    """
    if rewards.shape != group_index.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_index {tuple(group_index.shape)} must both be [R]")
    if torch.isinf(rewards).any():
        raise ValueError("a reward is infinite; a reward function that cannot score a rollout must return None")
    if rewards.numel() == 0:
        return rewards.clone()
    scored = ~torch.isnan(rewards)
    stats, has_signal = _group_statistics(torch.where(scored, rewards, 0.0).double(), scored, group_index)
    advantages = torch.where(scored & has_signal, ADVANTAGES[name](stats), 0.0)
    return advantages.to(rewards.dtype)


def _group_statistics(rewards: Tensor, scored: Tensor, group_index: Tensor) -> tuple[GroupStatistics, Tensor]:
    """The statistics of each rollout's group, and whether its scored rewards differ at all (``[R]`` bool)."""
    _, group = torch.unique(group_index, return_inverse=True)
    groups = int(group.max()) + 1

    def per_group(values: Tensor) -> Tensor:
        return torch.zeros(groups, dtype=torch.float64).index_add_(0, group, torch.where(scored, values, 0.0))

    count = per_group(torch.ones_like(rewards))
    mean = per_group(rewards) / count.clamp(min=1)
    variance = per_group((rewards - mean[group]) ** 2) / (count - 1).clamp(min=1)
    infinity = torch.full((groups,), torch.inf, dtype=torch.float64)
    highest = (-infinity).scatter_reduce(0, group, torch.where(scored, rewards, -torch.inf), "amax")
    lowest = infinity.scatter_reduce(0, group, torch.where(scored, rewards, torch.inf), "amin")
    stats = GroupStatistics(rewards, count[group], mean[group], variance.sqrt()[group])
    return stats, (highest > lowest)[group]
