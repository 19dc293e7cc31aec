"""Policy-gradient objectives over flat response tokens, and the loss that composes an objective with its correction,
its aggregation and its diagnostics. Pure.

Everything downstream of the forward pass is one flat row of response tokens ``[T]``; padding does not exist here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.aggregation import Denominators, aggregate
from trainer.corrections import correct, masked_log_ratio, safe_exp
from trainer.diagnostics import DiagnosticSums, diagnostic_sums

if TYPE_CHECKING:
    from trainer.config import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The response tokens of a micro-batch, flat. Every field is ``[T]``."""

    logprobs: Tensor
    """Current policy; float, carries the gradient."""
    behaviour_logprobs: Tensor
    """Policy that sampled the token; float."""
    advantages: Tensor
    """Float."""
    loss_mask: Tensor
    """Bool: whether the loss sees the token."""
    sequence: Tensor
    """int64: number of the token's rollout inside the micro-batch."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """An objective's loss per token ``[T]``, and which tokens were clipped at the lower and the upper bound (bool)."""

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def ppo_clip(batch: TokenBatch, proximal: Tensor, algorithm: AlgorithmConfig) -> TokenLoss:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r`` = current / proximal policy.

    PPO (arXiv:1707.06347), equation 7, with the asymmetric bounds of DAPO (arXiv:2503.14476). ``proximal`` is
    ``[T]``, detached. With ``proximal`` = current (one update a batch) ``r`` is 1 in value and carries the gradient.
    """
    ratio = safe_exp(masked_log_ratio(batch.logprobs, proximal, batch.loss_mask))
    low, high = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high
    loss = -torch.minimum(ratio * batch.advantages, ratio.clamp(low, high) * batch.advantages)
    return TokenLoss(loss, (ratio < low) & (batch.advantages < 0), (ratio > high) & (batch.advantages > 0))


def reinforce(batch: TokenBatch, proximal: Tensor, algorithm: AlgorithmConfig) -> TokenLoss:
    """``-A log pi``: the plain policy gradient (Williams 1992); nothing is clipped."""
    never = torch.zeros_like(batch.loss_mask)
    return TokenLoss(-batch.advantages * torch.where(batch.loss_mask, batch.logprobs, 0.0), never, never)


OBJECTIVES: dict[str, Callable[[TokenBatch, Tensor, AlgorithmConfig], TokenLoss]] = {
    "ppo_clip": ppo_clip,
    "reinforce": reinforce,
}
"""The objectives, by the name that ``algorithm.objective`` takes."""


def current_policy(batch: TokenBatch) -> Tensor:
    """The current policy, detached: right when each batch is used for one update."""
    return batch.logprobs.detach()


def behaviour_policy(batch: TokenBatch) -> Tensor:
    """The policy that sampled: the ratio itself then corrects for it, and a correction has weight 1 everywhere."""
    return batch.behaviour_logprobs


PROXIMAL_POLICIES: dict[str, Callable[[TokenBatch], Tensor]] = {
    "current": current_policy,
    "behaviour": behaviour_policy,
}
"""Anchors of the trust region, by the name that ``algorithm.proximal`` takes."""


def policy_loss(
    batch: TokenBatch, entropy: Tensor, algorithm: AlgorithmConfig, denominators: Denominators
) -> tuple[Tensor, DiagnosticSums]:
    """A micro-batch's share of the batch loss (scalar, with gradient) and its diagnostic sums.

    The decoupled objective of AReaL (arXiv:2505.24298): the correction carries a token from the behaviour to the
    proximal policy (weights, detached), the objective from the proximal to the current one. ``entropy`` is ``[T]``
    float, for diagnostics only.
    """
    proximal = PROXIMAL_POLICIES[algorithm.proximal](batch)
    correction = correct(
        algorithm.correction, proximal, batch.behaviour_logprobs, batch.loss_mask, algorithm.correction_cap
    )
    token_loss = OBJECTIVES[algorithm.objective](batch, proximal, algorithm)
    weighted = correction.weights * token_loss.loss
    loss = aggregate(algorithm.aggregation, weighted, batch.loss_mask, batch.sequence, denominators)
    return loss, diagnostic_sums(
        loss=loss,
        logprobs=batch.logprobs,
        behaviour_logprobs=batch.behaviour_logprobs,
        entropy=entropy,
        loss_mask=batch.loss_mask,
        clipped_low=token_loss.clipped_low,
        clipped_high=token_loss.clipped_high,
        truncated=correction.truncated,
    )
