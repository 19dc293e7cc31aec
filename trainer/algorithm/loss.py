"""The policy loss of a micro-batch: every part of the algorithm in the order in which it acts. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from trainer.algorithm.aggregation import Denominators, aggregate
from trainer.algorithm.choices import chosen
from trainer.algorithm.corrections import correct
from trainer.algorithm.diagnostics import DiagnosticSums, diagnostic_sums
from trainer.algorithm.objectives import OBJECTIVES
from trainer.algorithm.proximal import PROXIMAL_POLICIES
from trainer.algorithm.regularisers import entropy_bonus, kl_loss
from trainer.algorithm.tokens import TokenBatch

if TYPE_CHECKING:
    from trainer.config import AlgorithmConfig


def learns_without_advantage(algorithm: AlgorithmConfig) -> bool:
    """Whether a token with advantage 0 can change the loss; a user's own objective is not known well enough."""
    kl_in_loss = algorithm.kl.coefficient != 0 and algorithm.kl.place == "loss"
    return algorithm.entropy_bonus != 0 or kl_in_loss or "." in algorithm.objective


def policy_loss(
    batch: TokenBatch, algorithm: AlgorithmConfig, denominators: Denominators
) -> tuple[Tensor, DiagnosticSums]:
    """A micro-batch's share of the batch loss (scalar, with gradient) and its diagnostic sums.

    The correction carries a token from the behaviour to the proximal policy, the objective from there to the current
    one (arXiv:2110.00641); the KL penalty is an expectation over tokens as well and is weighted likewise, the entropy
    is not. Raises ``ValueError`` when the configuration needs log-probabilities that the batch does not carry.
    """
    proximal = chosen(PROXIMAL_POLICIES, algorithm.proximal)(batch)
    correction = correct(batch, proximal, algorithm.correction)
    objective = chosen(OBJECTIVES, algorithm.objective)(batch, proximal, algorithm)
    per_token = correction.weights * (objective.loss + kl_loss(batch, algorithm.kl))
    per_token = per_token + entropy_bonus(batch, algorithm.entropy_bonus)
    loss = aggregate(per_token, batch, denominators, algorithm)
    return loss, diagnostic_sums(batch, loss, objective, correction)
