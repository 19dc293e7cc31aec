"""Regularisers: a KL penalty towards a frozen reference policy, and an entropy bonus. Pure.

The penalty estimates KL(current || reference) on the sampled tokens, with ``x = log pi_current - log pi_reference``
(estimators of Schulman's note "Approximating KL divergence"). As an *estimate* k1 and k3 are unbiased and k2 is not; as
something to *differentiate* it is the other way round (arXiv:2510.01555): in the loss, the gradient of k1 has mean zero
and does nothing, that of k3 points the right way only to first order, and that of k2 is the gradient of the KL. In the
reward nothing is differentiated, and k1 is the right one. All of this holds for tokens of the current policy; for
others the importance weight makes up, which therefore multiplies the penalty too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.algorithm.choices import Choice, chosen
from trainer.algorithm.ratios import masked_log_ratio, safe_exp, sequence_sums
from trainer.algorithm.tokens import TokenBatch

if TYPE_CHECKING:
    from trainer.config import KLConfig


def k1(log_ratio: Tensor) -> Tensor:
    """``x``."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """``x^2 / 2``."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """``exp(-x) - 1 + x``, never negative."""
    return safe_exp(-log_ratio) - 1.0 + log_ratio


KL_ESTIMATORS: dict[str, Choice] = {
    "k1": Choice(k1, "x", "Schulman (2020)", "in the reward; in the loss its gradient has mean zero"),
    "k2": Choice(k2, "x^2 / 2", "Schulman (2020); arXiv:2510.01555", "in the loss: the gradient of the KL"),
    "k3": Choice(k3, "exp(-x) - 1 + x", "Schulman (2020); DeepSeekMath (arXiv:2402.03300)", "as GRPO had it; biased"),
}
"""Estimators of KL(current || reference), by the name that ``algorithm.kl.estimator`` takes; ``[T]`` to ``[T]``."""


def kl_loss(batch: TokenBatch, settings: KLConfig) -> Tensor:
    """The penalty per token ``[T]``, with gradient; 0 where ``kl.coefficient`` is 0 or ``kl.place`` is not ``loss``.

    Raises ``ValueError`` when it is wanted and the batch carries no reference log-probabilities.
    """
    if settings.coefficient == 0 or settings.place != "loss":
        return torch.zeros_like(batch.logprobs)
    if batch.reference_logprobs is None:
        raise ValueError("algorithm.kl.coefficient is not 0, and no log-probabilities of the reference were given")
    log_ratio = masked_log_ratio(batch.logprobs, batch.reference_logprobs, batch.loss_mask)
    penalty: Tensor = chosen(KL_ESTIMATORS, settings.estimator)(log_ratio)
    return settings.coefficient * penalty


@torch.no_grad()
def kl_reward(batch: TokenBatch, settings: KLConfig) -> Tensor:
    """What to subtract from the reward of each token's rollout, ``[T]``: the coefficient times the rollout's summed KL.

    The same for all tokens of a rollout. Computed before the advantages, with the policy before the first update in
    ``logprobs``. Raises ``ValueError`` when the batch carries no reference log-probabilities.
    """
    if batch.reference_logprobs is None:
        raise ValueError("algorithm.kl.place is reward, and no log-probabilities of the reference were given")
    log_ratio = masked_log_ratio(batch.logprobs, batch.reference_logprobs, batch.loss_mask)
    penalty = torch.where(batch.loss_mask, chosen(KL_ESTIMATORS, settings.estimator)(log_ratio), 0.0)
    return settings.coefficient * sequence_sums(penalty, batch.sequence)


def entropy_bonus(batch: TokenBatch, coefficient: float) -> Tensor:
    """``-coefficient * entropy`` per token ``[T]``: the loss falls as the policy spreads."""
    if coefficient == 0:
        return torch.zeros_like(batch.logprobs)
    return -coefficient * batch.entropy
