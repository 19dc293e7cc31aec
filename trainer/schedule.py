"""The learning rate of each step. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import OptimizerConfig


def learning_rate_at(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate of step ``step`` (from 0) of ``steps``; all updates of a batch have the same.

    A linear rise over ``warmup_steps``; from there constant, or falling along a line or half a cosine, towards 0 at
    ``steps``. A step past ``steps`` has the last one's rate.
    """
    warmup = config.warmup_steps
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "constant":
        return config.learning_rate
    progress = (min(step, steps - 1) - warmup) / max(steps - warmup, 1)
    progress = max(progress, 0.0)  # warmup_steps at steps or beyond: nothing is left to fall over
    share = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * share
