"""Behaviour corrections: importance weights from the policy that sampled a token to the proximal policy. Pure.

Two independent choices. The *weight* multiplies the token's loss and may be truncated to bounds. The *mask* leaves out
tokens whose ratio lies outside its bounds. Both depend on the current weights, so they are weights, 0 included, and not
part of the loss mask: a token left out here still counts in the loss denominators, as in the papers' formulas, and one
outlier does not raise the weight of all other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.algorithm.choices import chosen
from trainer.algorithm.ratios import LEVELS, masked_log_ratio, safe_exp
from trainer.algorithm.tokens import TokenBatch

if TYPE_CHECKING:
    from trainer.config import CorrectionConfig


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance weights ``[T]`` float, detached; which were cut to a bound, and which tokens were left out (bool)."""

    weights: Tensor
    truncated: Tensor
    masked: Tensor


@torch.no_grad()
def correct(batch: TokenBatch, proximal: Tensor, settings: CorrectionConfig) -> Correction:
    """The weights of proximal over behaviour policy; 1 in masked places. ``proximal`` is ``[T]`` log-probabilities.

    Truncated importance sampling: weight ``token``, ``weight_high``. IcePop (arXiv:2510.18855): weight and
    mask ``token``, ``mask_low`` and ``mask_high``. Masked importance sampling: the same with ``mask_high`` alone, or
    with a sequence level. Geometric sequence mask: mask ``sequence_geometric``.
    """
    log_ratio = masked_log_ratio(proximal, batch.behaviour_logprobs, batch.loss_mask)

    def ratio(level: str) -> Tensor:
        at_level = chosen(LEVELS, level)(log_ratio, batch.loss_mask, batch.sequence)
        return safe_exp(torch.where(batch.loss_mask, at_level, 0.0))

    weights = ratio(settings.weight)
    truncated = outside(weights, settings.weight_low, settings.weight_high)
    masked = outside(ratio(settings.mask), settings.mask_low, settings.mask_high)
    bounded = weights.clamp(settings.weight_low, _upper(settings.weight_high))
    return Correction(torch.where(masked, 0.0, bounded), truncated & ~masked, masked)


def outside(values: Tensor, low: float | None, high: float | None) -> Tensor:
    """Which values lie below ``low`` or above ``high`` (bool); ``None`` is no bound."""
    below = values < (-torch.inf if low is None else low)
    return below | (values > _upper(high))


def _upper(bound: float | None) -> float:
    return torch.inf if bound is None else bound
