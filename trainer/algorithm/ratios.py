"""Ratios of two policies on the sampled tokens, from log-probabilities, without overflow. Pure.

A ratio is handled as its logarithm and exponentiated once, at the end. Its *level* says which tokens it is formed over:
one token, or a whole rollout as product or as geometric mean of its tokens' ratios.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithm.choices import Choice

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to plus or minus this before ``exp`` (a ratio of 4.9e8), so that nothing overflows."""


def masked_log_ratio(numerator: Tensor, denominator: Tensor, loss_mask: Tensor) -> Tensor:
    """``numerator - denominator`` ``[T]``, exactly 0 (value and gradient) where ``loss_mask`` is false.

    Whatever stands in a masked place, infinities and NaN included, cannot reach a sum through ``0 * inf``.
    """
    return torch.where(loss_mask, numerator - denominator, 0.0)


def safe_exp(log_ratio: Tensor) -> Tensor:
    """``exp`` of a log-ratio clamped to ``LOG_RATIO_LIMIT``; finite for every finite or infinite input, NaN stays NaN.

    Past the limit the gradient is 0.
    """
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_sums(values: Tensor, sequence: Tensor) -> Tensor:
    """For every token the sum of ``values`` over its rollout, ``[T]``; differentiable."""
    rollouts = int(sequence.max()) + 1 if sequence.numel() else 0
    return values.new_zeros(rollouts).index_add(0, sequence, values)[sequence]


def none(log_ratio: Tensor, loss_mask: Tensor, sequence: Tensor) -> Tensor:
    """Ratio 1 everywhere."""
    return torch.zeros_like(log_ratio)


def token(log_ratio: Tensor, loss_mask: Tensor, sequence: Tensor) -> Tensor:
    """Each token's own ratio."""
    return log_ratio


def sequence_product(log_ratio: Tensor, loss_mask: Tensor, sequence: Tensor) -> Tensor:
    """The product of the ratios of the rollout's unmasked tokens: the exact ratio of the whole response."""
    return sequence_sums(log_ratio, sequence)


def sequence_geometric(log_ratio: Tensor, loss_mask: Tensor, sequence: Tensor) -> Tensor:
    """The geometric mean of the ratios of the rollout's unmasked tokens: independent of the response's length."""
    tokens = sequence_sums(loss_mask.to(log_ratio.dtype), sequence)
    return sequence_sums(log_ratio, sequence) / tokens.clamp(min=1)


LEVELS: dict[str, Choice] = {
    "none": Choice(none, "1", "", "only on-policy data, or where `algorithm.proximal=behaviour` corrects already"),
    "token": Choice(
        token,
        "rho_t = pi_proximal(y_t) / pi_behaviour(y_t)",
        "IMPALA (arXiv:1802.01561); decoupled PPO (arXiv:2110.00641); AReaL (arXiv:2505.24298)",
        "the usual correction: little variance, ignores that earlier tokens changed the state distribution",
    ),
    "sequence_product": Choice(
        sequence_product,
        "prod_t rho_t over the rollout",
        "the importance ratio of the trajectory (Precup et al. 2000)",
        "unbiased but for its bounds; its variance grows with the length, so only for short responses",
    ),
    "sequence_geometric": Choice(
        sequence_geometric,
        "(prod_t rho_t)^(1/|y|) over the rollout",
        "GSPO (arXiv:2507.18071), equation 7",
        "as a mask with bounds close to 1 it leaves out whole rollouts that drifted, whatever their length",
    ),
}
"""What a ratio is formed over, by the name that ``algorithm.correction.weight`` and ``.mask`` take.

Each function takes the log-ratio ``[T]`` (0 in masked places), the loss mask ``[T]`` and the rollout numbers ``[T]``,
and returns a log-ratio ``[T]``.
"""
