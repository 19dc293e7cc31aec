"""Proximal policies: the anchor that an objective measures its ratio against. Pure.

Decoupled PPO (arXiv:2110.00641) splits the ratio between the current and the behaviour policy in two: the
*correction* carries a token from the behaviour to the proximal policy, the *objective* from there to the current one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithm.choices import Choice
from trainer.algorithm.tokens import TokenBatch


def current(batch: TokenBatch) -> Tensor:
    """The current policy: right while each batch is used for one update, when both are the same."""
    return batch.logprobs.detach()


def behaviour(batch: TokenBatch) -> Tensor:
    """The policy that sampled: the objective's own ratio then corrects for it, and a correction is 1 everywhere."""
    return batch.behaviour_logprobs


def recomputed(batch: TokenBatch) -> Tensor:
    """The policy before the first update on this batch, from a forward pass of its own (AReaL, arXiv:2505.24298).

    Raises ``ValueError`` when the batch does not carry it.
    """
    if batch.proximal_logprobs is None:
        raise ValueError("algorithm.proximal is recomputed, and no log-probabilities of the proximal policy were given")
    return batch.proximal_logprobs.detach()


def log_linear(batch: TokenBatch) -> Tensor:
    """``alpha log behaviour + (1 - alpha) log current``, ``alpha`` = 0 for lag ``d`` = 0 and ``1 / d`` from 1 on.

    A-3PO (arXiv:2512.06547), with the lag of each *token*: a rollout that was resumed across pushes has
    several. For tokens one version old this is the behaviour policy; the older the token, the closer to the current.
    """
    alpha = torch.where(batch.lags >= 1, 1.0 / batch.lags.clamp(min=1).to(batch.logprobs.dtype), 0.0)
    return alpha * batch.behaviour_logprobs + (1.0 - alpha) * batch.logprobs.detach()


PROXIMAL_POLICIES: dict[str, Choice] = {
    "current": Choice(
        current,
        "pi_current, detached",
        "",
        "with one update a batch: the objective's ratio is 1, and the correction does the whole work",
    ),
    "behaviour": Choice(
        behaviour,
        "pi_behaviour",
        "PPO (arXiv:1707.06347)",
        "the trust region also covers staleness and engine mismatch; needs no correction",
    ),
    "recomputed": Choice(
        recomputed,
        "pi before the first update on the batch",
        "decoupled PPO (arXiv:2110.00641); AReaL (arXiv:2505.24298)",
        "with several updates a batch: the trust region is around the newest weights, at the price of a forward pass",
    ),
    "log_linear": Choice(
        log_linear,
        "exp(alpha log pi_behaviour + (1 - alpha) log pi_current), alpha = 1/lag, 0 for lag 0",
        "A-3PO (arXiv:2512.06547)",
        "instead of `recomputed`, without its forward pass",
    ),
}
"""Anchors of the trust region, by the name that ``algorithm.proximal`` takes. Each returns ``[T]``, detached."""
