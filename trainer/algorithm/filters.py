"""Filters: what of a batch the loss does not see, decided from rewards and lengths before the update. Pure.

What a filter takes out leaves the loss mask, and with it every denominator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def keep_group(rewards: Sequence[float | None]) -> bool:
    """Whether a group teaches a group-relative advantage anything: two scored rollouts whose rewards differ.

    The decision of DAPO's dynamic sampling (arXiv:2503.14476, equation 11), which refills the batch with other groups
    (``algorithm.filter.refill``). ``None`` stands for a rollout without a reward.
    """
    scored = [reward for reward in rewards if reward is not None and not math.isnan(reward)]
    return len(set(scored)) > 1


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer: int, penalty: float) -> Tensor:
    """What to add to the reward of a rollout with ``lengths`` ``[R]`` response tokens: ``[R]`` float64, at most 0.

    0 up to ``max_tokens - buffer`` tokens, then falling linearly to ``-penalty`` at ``max_tokens``, and there beyond.
    DAPO (arXiv:2503.14476), equation 13, for which ``penalty`` is 1. Raises ``ValueError`` for a buffer that does not
    lie between 1 and ``max_tokens``.
    """
    if not 1 <= buffer <= max_tokens:
        raise ValueError(f"algorithm.filter.overlong_buffer is {buffer}; it must lie between 1 and {max_tokens} tokens")
    excess = lengths.double() - (max_tokens - buffer)
    return -penalty * torch.clamp(excess / buffer, 0.0, 1.0)
