"""Aggregation of token losses into one scalar, with denominators of the *whole* batch. Pure.

The denominators are counted once, after all masks, over all rollouts of the batch. A micro-batch's loss is its share of
the batch loss, and shares simply add up: over micro-batches by gradient accumulation, over ranks by a *sum* of
gradients. So the update does not depend on how the batch was split, packed or sharded. Every sequence must lie in one
micro-batch; a prompt group need not.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.algorithm.choices import Choice, chosen
from trainer.algorithm.ratios import sequence_sums
from trainer.algorithm.tokens import TokenBatch

if TYPE_CHECKING:
    from trainer.config import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts over the whole batch (all micro-batches, all ranks), after all masks."""

    tokens: int
    """Response tokens with the loss mask set."""
    sequences: int
    """Rollouts with at least one such token."""
    prompt_tokens: tuple[int, ...]
    """Such tokens of each prompt group, by the group's number in the batch."""

    @property
    def prompts(self) -> int:
        """Prompt groups with at least one such token."""
        return sum(tokens > 0 for tokens in self.prompt_tokens)

    def __add__(self, other: Denominators) -> Denominators:
        """Those of two parts of a batch together."""
        pairs = zip_longest(self.prompt_tokens, other.prompt_tokens, fillvalue=0)
        return Denominators(
            self.tokens + other.tokens, self.sequences + other.sequences, tuple(a + b for a, b in pairs)
        )


def token_mean(loss: Tensor, batch: TokenBatch, denominators: Denominators, algorithm: AlgorithmConfig) -> Tensor:
    """Mean over all tokens of the batch: long rollouts weigh more. DAPO (arXiv:2503.14476)."""
    return loss.sum() / max(denominators.tokens, 1)


def sequence_mean(loss: Tensor, batch: TokenBatch, denominators: Denominators, algorithm: AlgorithmConfig) -> Tensor:
    """Mean over rollouts of the mean over their tokens. DeepSeekMath (arXiv:2402.03300)."""
    tokens = sequence_sums(batch.loss_mask.to(loss.dtype), batch.sequence)
    return (loss / tokens.clamp(min=1)).sum() / max(denominators.sequences, 1)


def sequence_sum(loss: Tensor, batch: TokenBatch, denominators: Denominators, algorithm: AlgorithmConfig) -> Tensor:
    """Mean over rollouts of the sum over their tokens divided by a constant: no length bias.

    Dr. GRPO (arXiv:2503.20783). The constant is ``sum_length``, which a run sets to ``sampling.max_tokens`` where it
    is 0. Raises ``ValueError`` where it is 0 still.
    """
    if algorithm.sum_length < 1:
        raise ValueError("algorithm.sum_length is 0: aggregation sequence_sum needs the constant it divides by")
    return loss.sum() / (max(denominators.sequences, 1) * algorithm.sum_length)


def prompt_mean(loss: Tensor, batch: TokenBatch, denominators: Denominators, algorithm: AlgorithmConfig) -> Tensor:
    """Mean over prompt groups of the mean over all tokens of the group. ScaleRL (arXiv:2510.13786)."""
    tokens = torch.tensor(denominators.prompt_tokens, dtype=loss.dtype, device=loss.device)[batch.group]
    return (loss / tokens.clamp(min=1)).sum() / max(denominators.prompts, 1)


AGGREGATIONS: dict[str, Choice] = {
    "token_mean": Choice(
        token_mean,
        "sum of all losses / tokens of the batch",
        "DAPO (arXiv:2503.14476)",
        "every token counts the same, whatever was masked around it; the default",
    ),
    "sequence_mean": Choice(
        sequence_mean,
        "mean over rollouts of the mean over their tokens",
        "DeepSeekMath (arXiv:2402.03300)",
        "with sequence-level objectives; where expired tokens are masked, the remaining ones of a rollout weigh more",
    ),
    "sequence_sum": Choice(
        sequence_sum,
        "mean over rollouts of (sum over their tokens / sum_length)",
        "Dr. GRPO (arXiv:2503.20783)",
        "without length bias; the step shrinks with every masked token",
        ("sum_length",),
    ),
    "prompt_mean": Choice(
        prompt_mean,
        "mean over prompts of the mean over all tokens of the prompt's rollouts",
        "ScaleRL (arXiv:2510.13786)",
        "where slow, long prompts must not outweigh short ones in the batches that staleness lets through",
    ),
}
"""The aggregations, by the name that ``algorithm.aggregation`` takes.

Each function takes the losses ``[T]`` (0 in masked places), the tokens, the denominators and the configuration, and
returns this micro-batch's share of the batch loss, a scalar.
"""


COUNTED: dict[str, str] = {
    "token_mean": "tokens",
    "sequence_mean": "sequences",
    "sequence_sum": "sequences",
    "prompt_mean": "prompts",
}
"""The count of :class:`Denominators` that each aggregation is a mean over, by its name.

Nothing else of a share depends on what other prompt groups there are. So a part of the batch, made of whole groups, can
be aggregated before the batch is known: its loss, with the part's own denominators, times the part's count is a sum
that adds up over parts, and that sum divided by the count of the batch is the batch loss.
"""


def counted(denominators: Denominators, algorithm: AlgorithmConfig) -> int:
    """What the aggregation divides by: see :data:`COUNTED`; 1 where that is 0, and with it every loss.

    Raises ``KeyError`` for an aggregation of the user's own.
    """
    return max(1, getattr(denominators, COUNTED[algorithm.aggregation]))


def aggregate(loss: Tensor, batch: TokenBatch, denominators: Denominators, algorithm: AlgorithmConfig) -> Tensor:
    """This micro-batch's share of the batch loss, a scalar; 0 (with gradient 0) for an empty micro-batch.

    ``loss`` is ``[T]`` float. What stands in masked places is not looked at.
    """
    seen = torch.where(batch.loss_mask, loss, 0.0)
    share: Tensor = chosen(AGGREGATIONS, algorithm.aggregation)(seen, batch, denominators, algorithm)
    return share
