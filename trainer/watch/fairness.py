"""Who is learned from: the share of what was sampled that the loss saw, by length and difficulty of the prompt. Pure.

What is dropped for its age is by nature what took long. Where the shares of long or hard prompts fall behind those of
short or easy ones for many steps, the bound is too narrow for them, or ``staleness.on_expired`` drops too much.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from generator.rollout import Group
from trainer.watch.metrics import trained_tokens


def fairness_metrics(learned: Sequence[Group], dropped: Sequence[Group]) -> dict[str, float]:
    """``fairness/*`` of a step: of each half of the prompts, the share of its sampled tokens that the loss saw.

    ``learned`` are the groups of the batch with their masks, ``dropped`` those that were taken and passed over. The
    halves are those below and above the median; a prompt at the median is in neither, and a half without a prompt has
    no share. Length is the mean of a group's sampled tokens, difficulty its mean reward; a group without a reward has
    no difficulty.
    """
    shares: dict[str, float] = {}
    groups = [(group, True) for group in learned] + [(group, False) for group in dropped]
    for (lower, upper), measured in (
        (("short", "long"), mean_length),
        (("hard", "easy"), mean_reward),
    ):
        shares |= _halves(groups, lower, upper, measured)
    return shares


def mean_length(group: Group) -> float:
    """Sampled tokens of a rollout of the group, mean."""
    return statistics.fmean(item.rollout.sampled_tokens for item in group.rollouts)


def mean_reward(group: Group) -> float | None:
    """Mean reward of the group; ``None`` where no rollout has one."""
    rewards = [item.reward for item in group.rollouts if item.reward is not None]
    return statistics.fmean(rewards) if rewards else None


def _halves(
    groups: Sequence[tuple[Group, bool]], lower: str, upper: str, measured: Callable[[Group], float | None]
) -> dict[str, float]:
    known = [(value, group, used) for group, used in groups if (value := measured(group)) is not None]
    if not known:
        return {}
    middle = statistics.median(value for value, *_ in known)
    shares = {}
    for name, half in (
        (lower, [(group, used) for value, group, used in known if value < middle]),
        (upper, [(group, used) for value, group, used in known if value > middle]),
    ):
        sampled = sum(item.rollout.sampled_tokens for group, _ in half for item in group.rollouts)
        trained = sum(trained_tokens(item.rollout) for group, used in half if used for item in group.rollouts)
        if sampled:
            shares[f"fairness/{name}_trained_share"] = trained / sampled
    return shares
