"""Aggregation of token losses into one scalar, with denominators of the *whole* batch. Pure.

The denominators are counted once, after all masks, over all rollouts of the batch. A micro-batch's loss is its share of
the batch loss, and shares simply add up: over micro-batches by gradient accumulation, over ranks by a *sum* of
gradients. So the update does not depend on how the batch was split, packed or sharded. Every sequence must lie in one
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts over the whole batch (all micro-batches, all ranks), after all masks."""

    tokens: int
    """Response tokens with the loss mask set."""
    sequences: int
    """Rollouts with at least one such token."""


def token_mean(loss: Tensor, sequence: Tensor, tokens_of: Tensor, denominators: Denominators) -> Tensor:
    """Mean over all tokens of the batch: long rollouts weigh more. DAPO (arXiv:2503.14476)."""
    return loss.sum() / max(denominators.tokens, 1)


def sequence_mean(loss: Tensor, sequence: Tensor, tokens_of: Tensor, denominators: Denominators) -> Tensor:
    """Mean over rollouts of the mean over their tokens. DeepSeekMath (arXiv:2402.03300)."""
    return (loss / tokens_of[sequence].clamp(min=1)).sum() / max(denominators.sequences, 1)


def sequence_sum(loss: Tensor, sequence: Tensor, tokens_of: Tensor, denominators: Denominators) -> Tensor:
    """Mean over rollouts of the sum over their tokens: no length bias. Dr. GRPO (arXiv:2503.20783)."""
    return loss.sum() / max(denominators.sequences, 1)


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Denominators], Tensor]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
}
"""The aggregations, by the name that ``algorithm.aggregation`` takes."""


def aggregate(name: str, loss: Tensor, loss_mask: Tensor, sequence: Tensor, denominators: Denominators) -> Tensor:
    """This micro-batch's share of the batch loss, a scalar; 0 (with gradient 0) for an empty micro-batch.

    ``loss`` is ``[T]`` float, ``loss_mask`` ``[T]`` bool, ``sequence`` ``[T]`` int64 numbers the rollouts of this
    micro-batch.
    """
    tokens_of = torch.bincount(sequence, weights=loss_mask.to(loss.dtype))
    return AGGREGATIONS[name](torch.where(loss_mask, loss, 0.0), sequence, tokens_of, denominators)
