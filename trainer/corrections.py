"""Behaviour corrections: importance weights from the policy that sampled a token to the proximal policy. Pure.

A correction is a *weight*, not a mask: a token whose weight is 0 still counts in the loss denominators, so that one
outlier does not raise the weight of all other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to plus or minus this before ``exp`` (a ratio of 4.9e8), so that nothing overflows."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance weights ``[T]`` (detached) and which of them were changed by the cap, ``[T]`` bool."""

    weights: Tensor
    truncated: Tensor


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


def token_truncate(log_ratio: Tensor, cap: float) -> Correction:
    """``min(ratio, cap)`` a token: truncated importance sampling. IMPALA (arXiv:1802.01561), per token."""
    ratio = safe_exp(log_ratio)
    return Correction(ratio.clamp(max=cap), ratio > cap)


def token_mask(log_ratio: Tensor, cap: float) -> Correction:
    """``ratio`` where it is at most ``cap``, else 0: tokens too unlikely under the behaviour policy teach nothing.

    Masked importance sampling on the token level, one-sided: the upper bound of IcePop (arXiv:2510.18855).
    """
    ratio = safe_exp(log_ratio)
    truncated = ratio > cap
    return Correction(torch.where(truncated, 0.0, ratio), truncated)


def none(log_ratio: Tensor, cap: float) -> Correction:
    """Weight 1 for every token: no correction."""
    return Correction(torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool))


CORRECTIONS: dict[str, Callable[[Tensor, float], Correction]] = {
    "token_truncate": token_truncate,
    "token_mask": token_mask,
    "none": none,
}
"""The behaviour corrections, by the name that ``algorithm.correction`` takes."""


def correct(name: str, proximal: Tensor, behaviour: Tensor, loss_mask: Tensor, cap: float) -> Correction:
    """The importance weights of proximal over behaviour policy, ``[T]`` detached; 1 in masked places.

    ``proximal`` and ``behaviour`` are log-probabilities ``[T]``.
    """
    log_ratio = masked_log_ratio(proximal.detach(), behaviour, loss_mask)
    return CORRECTIONS[name](log_ratio, cap)
