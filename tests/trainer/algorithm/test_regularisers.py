"""KL estimators: what they estimate, and which gradient they have, on a distribution small enough to sum over."""

from dataclasses import replace

import pytest
import torch

from tests.trainer.algorithm.cases import make_case, tokens
from trainer.algorithm.regularisers import KL_ESTIMATORS, kl_loss, kl_reward
from trainer.config import KLConfig

LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([0.0, -0.4, 0.5, 0.9], dtype=torch.float64), 0)


def expected_under_the_policy(name: str) -> tuple[float, torch.Tensor]:
    """Mean of the estimator over tokens of the current policy, and the mean of its gradient with tokens held fixed."""
    logits = LOGITS.clone().requires_grad_()
    log_p = torch.log_softmax(logits, 0)
    estimate = (log_p.exp().detach() * KL_ESTIMATORS[name].function(log_p - REFERENCE)).sum()
    (gradient,) = torch.autograd.grad(estimate, logits)
    return estimate.item(), gradient


def true_kl() -> tuple[float, torch.Tensor]:
    logits = LOGITS.clone().requires_grad_()
    log_p = torch.log_softmax(logits, 0)
    divergence = (log_p.exp() * (log_p - REFERENCE)).sum()
    (gradient,) = torch.autograd.grad(divergence, logits)
    return divergence.item(), gradient


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_estimate_the_divergence_without_bias(name):
    assert expected_under_the_policy(name)[0] == pytest.approx(true_kl()[0])


def test_in_the_loss_k2_has_the_gradient_of_the_divergence_and_k1_has_none():
    assert torch.allclose(expected_under_the_policy("k2")[1], true_kl()[1])
    assert torch.allclose(expected_under_the_policy("k1")[1], torch.zeros_like(LOGITS))
    assert not torch.allclose(expected_under_the_policy("k3")[1], true_kl()[1], rtol=0.1)


def test_in_the_reward_a_rollout_pays_the_sum_over_its_unmasked_tokens_and_the_loss_pays_nothing():
    case = make_case()
    batch = tokens(case)
    settings = KLConfig(0.5, "k1", "reward")
    paid = kl_reward(batch, settings).tolist()
    for t, number in enumerate(case.sequence):
        members = [u for u, s in enumerate(case.sequence) if s == number and case.mask[u]]
        assert paid[t] == pytest.approx(0.5 * sum(case.current[u] - case.reference[u] for u in members))
    assert kl_loss(batch, settings).tolist() == [0.0] * len(case.mask)


def test_a_penalty_in_the_reward_without_a_reference_is_refused():
    with pytest.raises(ValueError, match="reference"):
        kl_reward(replace(tokens(make_case()), reference_logprobs=None), KLConfig(0.5, "k1", "reward"))
