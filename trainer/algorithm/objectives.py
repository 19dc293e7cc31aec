"""Policy-gradient objectives: the loss of each response token, before correction and aggregation. Pure.

In the formulas, ``A`` is the advantage and ``r`` the token's ratio of the current to the proximal policy; ``sg`` stops
the gradient. A bound that is ``None`` does not bind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.algorithm.choices import Choice
from trainer.algorithm.ratios import masked_log_ratio, safe_exp, sequence_geometric, sequence_product
from trainer.algorithm.tokens import TokenBatch

if TYPE_CHECKING:
    from trainer.config import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """An objective's loss per token ``[T]``, and which tokens were held at the lower and the upper bound (bool)."""

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def ppo_clip(batch: TokenBatch, proximal: Tensor, algorithm: AlgorithmConfig) -> TokenLoss:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``; with ``clip_dual`` = c at most ``-c A`` where A < 0.

    PPO (arXiv:1707.06347), equation 7, with the asymmetric bounds of DAPO (arXiv:2503.14476) and the dual clip of
    arXiv:1912.09729, which bounds the loss of a bad token that has become much more likely.
    """
    return _clipped(safe_exp(_log_ratio(batch, proximal)), batch.advantages, algorithm)


def gspo(batch: TokenBatch, proximal: Tensor, algorithm: AlgorithmConfig) -> TokenLoss:
    """``ppo_clip`` with ``s``, the geometric mean of the rollout's ratios, in the place of ``r``.

    GSPO (arXiv:2507.18071), equations 5 and 7. The gradient flows through ``s`` into every unmasked token of the
    rollout; all tokens of a rollout have the same loss, so aggregation ``sequence_mean`` gives the paper's loss.
    """
    log_ratio = sequence_geometric(_log_ratio(batch, proximal), batch.loss_mask, batch.sequence)
    return _clipped(safe_exp(log_ratio), batch.advantages, algorithm)


def reinforce(batch: TokenBatch, proximal: Tensor, algorithm: AlgorithmConfig) -> TokenLoss:
    """``-A log pi``: the plain policy gradient (Williams 1992); nothing is clipped."""
    return _weighted_score(batch, torch.ones_like(batch.advantages), *_never(batch))


def cispo(batch: TokenBatch, proximal: Tensor, algorithm: AlgorithmConfig) -> TokenLoss:
    """``-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi``: every token keeps a gradient.

    CISPO (MiniMax-M1, arXiv:2506.13585), equation 4; the paper sets no lower bound.
    """
    ratio = safe_exp(_log_ratio(batch, proximal)).detach()
    low, high = _bounds(algorithm)
    return _weighted_score(batch, ratio.clamp(low, high), ratio < low, ratio > high)


def sapo(batch: TokenBatch, proximal: Tensor, algorithm: AlgorithmConfig) -> TokenLoss:
    """``-(4 / tau) sigmoid(tau (r - 1)) A``, ``tau`` = ``gate_positive`` where A > 0, else ``gate_negative``.

    SAPO (arXiv:2511.20347): a gate whose slope is 1 at r = 1 and fades smoothly on both sides, in the place of a clip.
    """
    ratio = safe_exp(_log_ratio(batch, proximal))
    # Tensors, because two plain numbers would be chosen from in float32.
    positive, negative = ratio.new_tensor(algorithm.gate_positive), ratio.new_tensor(algorithm.gate_negative)
    tau = torch.where(batch.advantages > 0, positive, negative)
    return TokenLoss(-torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau) * batch.advantages, *_never(batch))


def dppo(batch: TokenBatch, proximal: Tensor, algorithm: AlgorithmConfig) -> TokenLoss:
    """``-M r A``; M is 0 where the step leads away (A > 0 and r > 1, or A < 0 and r < 1) and D > ``divergence_limit``.

    DPPO (arXiv:2602.04879), equation 12. D compares proximal and current policy as to the sampled token against all
    others: ``divergence`` ``tv`` is equation 13, ``kl`` equation 14. Masked tokens are reported as clipped.
    """
    log_ratio = _log_ratio(batch, proximal)
    ratio = safe_exp(log_ratio)
    with torch.no_grad():
        distance = DIVERGENCES[algorithm.divergence](
            torch.where(batch.loss_mask, proximal, 0.0), torch.where(batch.loss_mask, batch.logprobs, 0.0)
        )
        far = distance > algorithm.divergence_limit
        low = far & (log_ratio < 0) & (batch.advantages < 0)
        high = far & (log_ratio > 0) & (batch.advantages > 0)
    return TokenLoss(torch.where(low | high, 0.0, -ratio * batch.advantages), low, high)


def topr(batch: TokenBatch, proximal: Tensor, algorithm: AlgorithmConfig) -> TokenLoss:
    """``-w A log pi``; ``w`` is 1 where A >= 0, else the product of the rollout's ratios, cut to at most 1, detached.

    TOPR (arXiv:2503.14286): good rollouts are imitated however unlikely they have become, bad ones are unlearned only
    as far as the policy still produces them.
    """
    product = sequence_product(_log_ratio(batch, proximal).detach(), batch.loss_mask, batch.sequence)
    tapered = batch.advantages < 0
    weights = torch.where(tapered, safe_exp(product.clamp(max=0.0)), 1.0)
    return _weighted_score(batch, weights, torch.zeros_like(tapered), tapered & (product > 0))


def _log_ratio(batch: TokenBatch, proximal: Tensor) -> Tensor:
    return masked_log_ratio(batch.logprobs, proximal, batch.loss_mask)


def _bounds(algorithm: AlgorithmConfig) -> tuple[float, float]:
    low = -torch.inf if algorithm.clip_low is None else 1.0 - algorithm.clip_low
    return low, torch.inf if algorithm.clip_high is None else 1.0 + algorithm.clip_high


def _clipped(ratio: Tensor, advantages: Tensor, algorithm: AlgorithmConfig) -> TokenLoss:
    low, high = _bounds(algorithm)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clipped_high = (ratio > high) & (advantages > 0)
    if algorithm.clip_dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -algorithm.clip_dual * advantages), loss)
        clipped_high |= (ratio > algorithm.clip_dual) & (advantages < 0)
    return TokenLoss(loss, (ratio < low) & (advantages < 0), clipped_high)


def _weighted_score(batch: TokenBatch, weights: Tensor, clipped_low: Tensor, clipped_high: Tensor) -> TokenLoss:
    """``-w A log pi`` with weights ``[T]`` that carry no gradient."""
    loss = -weights * batch.advantages * torch.where(batch.loss_mask, batch.logprobs, 0.0)
    return TokenLoss(loss, clipped_low, clipped_high)


def _never(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    never = torch.zeros_like(batch.loss_mask)
    return never, never


def total_variation(proximal: Tensor, logprobs: Tensor) -> Tensor:
    """``|p - q|`` of the sampled token, ``[T]``, from log-probabilities."""
    return (proximal.exp() - logprobs.exp()).abs()


def binary_kl(proximal: Tensor, logprobs: Tensor) -> Tensor:
    """``p log(p / q) + (1 - p) log((1 - p) / (1 - q))`` of proximal ``p`` and current ``q``, ``[T]``.

    Computed in float64, with both probabilities at least 1e-12 away from 1, so that it stays finite.
    """
    p, q = proximal.double().clamp(max=-1e-12), logprobs.double().clamp(max=-1e-12)
    other_p, other_q = -torch.expm1(p), -torch.expm1(q)
    return p.exp() * (p - q) + other_p * (other_p.log() - other_q.log())


DIVERGENCES = {"tv": total_variation, "kl": binary_kl}
"""What DPPO measures, by the name that ``algorithm.divergence`` takes."""

OBJECTIVES: dict[str, Choice] = {
    "ppo_clip": Choice(
        ppo_clip,
        "-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); at most -clip_dual A where A < 0",
        "PPO (arXiv:1707.06347); DAPO (arXiv:2503.14476); dual clip (arXiv:1912.09729)",
        "with a correction up to a few versions; against the behaviour policy it drops more tokens the older they are",
        ("clip_low", "clip_high", "clip_dual"),
    ),
    "reinforce": Choice(
        reinforce,
        "-A log pi",
        "Williams (1992)",
        "one update a batch, with an importance weight; no trust region, so keep the learning rate small",
    ),
    "gspo": Choice(
        gspo,
        "-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = (prod_t r_t)^(1/|y|)",
        "GSPO (arXiv:2507.18071)",
        "for mixture-of-experts models, whose token ratios are noisy; its bounds are of the order of 1e-3",
        ("clip_low", "clip_high", "clip_dual"),
    ),
    "cispo": Choice(
        cispo,
        "-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi",
        "MiniMax-M1 (arXiv:2506.13585)",
        "keeps the gradient of rare, decisive tokens that a clip would drop; stands several versions of lag",
        ("clip_low", "clip_high"),
    ),
    "sapo": Choice(
        sapo,
        "-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A",
        "SAPO (arXiv:2511.20347)",
        "a soft trust region where the hard bounds of ppo_clip or gspo drop too much",
        ("gate_positive", "gate_negative"),
    ),
    "dppo": Choice(
        dppo,
        "-M r A, M = 0 where the step leads away from the proximal policy and D > divergence_limit",
        "DPPO (arXiv:2602.04879)",
        "against the behaviour policy; judges probability mass, so rare tokens are not dropped for a large ratio",
        ("divergence", "divergence_limit"),
    ),
    "topr": Choice(
        topr,
        "-w A log pi, w = 1 where A >= 0, else sg(min(prod_t r_t, 1))",
        "TOPR (arXiv:2503.14286)",
        "far off-policy, even offline: needs no trust region to stay stable",
    ),
}
"""The objectives, by the name that ``algorithm.objective`` takes.

Each function takes the tokens, the proximal log-probabilities ``[T]`` (detached) and the configuration, and returns a
:class:`TokenLoss`. Values in masked places are ignored.
"""
