"""Advantages: how much better a rollout was than its prompt group or its batch. Pure tensor functions.

A rollout whose reward is ``NaN`` is excluded: it gets advantage 0 and does not count in any statistics. A group with
fewer than two scored rollouts, or whose scored rewards are all equal, carries no signal: its group-relative advantages
are exactly 0, whatever rounding would make of ``reward - mean``. So does a batch for ``reinforce_pp``. Only ``reward``
gives a lone rollout an advantage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithm.choices import Choice, chosen

STD_EPSILON = 1e-6
"""Added to a deviation that is divided by, in units of reward."""


@dataclass(frozen=True, slots=True)
class RewardStatistics:
    """Rewards ``[R]`` float64 (0 where excluded) and their statistics over the scored rollouts."""

    rewards: Tensor
    scored: Tensor
    """``[R]`` bool."""
    count: Tensor
    """``[R]`` float64: scored rollouts of the rollout's group."""
    mean: Tensor
    """``[R]`` float64: of the rollout's group."""
    std: Tensor
    """``[R]`` float64: of the rollout's group, unbiased (divided by ``count - 1``); 0 for a group of one."""
    has_signal: Tensor
    """``[R]`` bool: whether the scored rewards of the rollout's group differ at all."""

    @property
    def centred(self) -> Tensor:
        """Reward minus group mean ``[R]``; exactly 0 without signal, or where excluded."""
        return torch.where(self.scored & self.has_signal, self.rewards - self.mean, 0.0)


def grpo(stats: RewardStatistics) -> Tensor:
    """``(r - mean) / (std + 1e-6)`` with the unbiased group deviation. DeepSeekMath (arXiv:2402.03300)."""
    return stats.centred / (stats.std + STD_EPSILON)


def grpo_batch_std(stats: RewardStatistics) -> Tensor:
    """``(r - group mean) / (batch std + 1e-6)``: the unbiased deviation of all rewards. arXiv:2508.08221."""
    return stats.centred / (unbiased_std(stats.rewards[stats.scored]) + STD_EPSILON)


def dr_grpo(stats: RewardStatistics) -> Tensor:
    """``r - mean``: no division by the deviation. Dr. GRPO (arXiv:2503.20783)."""
    return stats.centred


def rloo(stats: RewardStatistics) -> Tensor:
    """``r`` minus the mean of the *other* rollouts, ``n / (n - 1) * (r - mean)``. RLOO (arXiv:2402.14740)."""
    return stats.count / (stats.count - 1).clamp(min=1) * stats.centred


def reinforce_pp(stats: RewardStatistics) -> Tensor:
    """``(r - batch mean) / (batch std + 1e-6)``. REINFORCE++ (arXiv:2501.03262).

    Over the rollouts of the batch, not over their tokens, so that a long response does not move the mean further.
    """
    rewards = stats.rewards[stats.scored]
    if rewards.numel() == 0 or bool((rewards == rewards[0]).all()):
        return torch.zeros_like(stats.rewards)
    return (stats.rewards - rewards.mean()) / (unbiased_std(rewards) + STD_EPSILON)


def reinforce_pp_baseline(stats: RewardStatistics) -> Tensor:
    """``(r - group mean) / (std of that over the batch + 1e-6)``. REINFORCE++-baseline (arXiv:2501.03262).

    The batch mean of the centred rewards is 0 by construction and is not subtracted again.
    """
    return stats.centred / (unbiased_std(stats.centred[stats.scored]) + STD_EPSILON)


def reward(stats: RewardStatistics) -> Tensor:
    """``r``: no baseline."""
    return stats.rewards


ADVANTAGES: dict[str, Choice] = {
    "grpo": Choice(
        grpo,
        "(r - group mean) / (group std + 1e-6)",
        "DeepSeekMath (arXiv:2402.03300)",
        "any lag; amplifies groups that are almost solved or almost hopeless",
    ),
    "grpo_batch_std": Choice(
        grpo_batch_std,
        "(r - group mean) / (batch std + 1e-6)",
        "Lite PPO (arXiv:2508.08221)",
        "as grpo, but no group is amplified; steadier when staleness leaves few groups in a batch",
    ),
    "dr_grpo": Choice(
        dr_grpo, "r - group mean", "Dr. GRPO (arXiv:2503.20783)", "any lag; the reward's scale sets the step"
    ),
    "rloo": Choice(
        rloo, "r - mean of the others of the group", "RLOO (arXiv:2402.14740)", "any lag; unbiased baseline"
    ),
    "reinforce_pp": Choice(
        reinforce_pp,
        "(r - batch mean) / (batch std + 1e-6)",
        "REINFORCE++ (arXiv:2501.03262)",
        "works with one rollout a prompt, so no group waits for its slowest rollout",
    ),
    "reinforce_pp_baseline": Choice(
        reinforce_pp_baseline,
        "(r - group mean) / (batch std of that + 1e-6)",
        "REINFORCE++-baseline (arXiv:2501.03262)",
        "as grpo_batch_std, with the deviation of the centred rewards",
    ),
    "reward": Choice(reward, "r", "Williams (1992)", "with objectives that need the reward's own sign, such as topr"),
}
"""The advantage estimators, by the name that ``algorithm.advantage`` takes.

Each function takes :class:`RewardStatistics` and returns ``[R]`` float64.
"""


def compute_advantages(rewards: Tensor, group_index: Tensor, name: str) -> Tensor:
    """Advantages ``[R]`` (dtype of ``rewards``), computed in float64; 0 for an excluded rollout.

    ``rewards`` is ``[R]`` float, ``NaN`` for an excluded rollout. ``group_index`` is ``[R]`` int64: rollouts with the
    same index are one prompt group; indices need be neither dense nor sorted.

    Raises ``ValueError`` for a shape mismatch, an infinite reward, or an advantage that is not finite.
    """
    if rewards.shape != group_index.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_index {tuple(group_index.shape)} must both be [R]")
    if torch.isinf(rewards).any():
        raise ValueError("a reward is infinite; a reward function that cannot score a rollout must return None")
    if rewards.numel() == 0:
        return rewards.clone()
    stats = reward_statistics(rewards, group_index)
    advantages: Tensor = torch.where(stats.scored, chosen(ADVANTAGES, name)(stats), 0.0)
    if not torch.isfinite(advantages).all():
        raise ValueError(f"algorithm.advantage={name} gave an advantage that is not finite")
    return advantages.to(rewards.dtype)


def unbiased_std(values: Tensor) -> Tensor:
    """The deviation of ``values`` ``[N]`` divided by ``N - 1``; 0 for fewer than two. A scalar."""
    return values.std() if values.numel() > 1 else values.new_zeros(())


def reward_statistics(rewards: Tensor, group_index: Tensor) -> RewardStatistics:
    """The statistics of each rollout's group; ``rewards`` ``[R]`` float with ``NaN`` where excluded, ``R`` >= 1."""
    scored = ~torch.isnan(rewards)
    rewards = torch.where(scored, rewards, 0.0).double()
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
    return RewardStatistics(
        rewards, scored, count[group], mean[group], variance.sqrt()[group], (highest > lowest)[group]
    )
