"""Importance weights of the behaviour corrections."""

import math

import pytest
import torch

from trainer.corrections import CORRECTIONS, LOG_RATIO_LIMIT, correct, safe_exp

RATIOS = [0.1, 1.0, 1.9, 2.1, 50.0]
MASK = torch.ones(5, dtype=torch.bool)


def corrected(name: str, mask: torch.Tensor = MASK):
    proximal = torch.tensor(RATIOS, dtype=torch.float64).log().requires_grad_()
    return correct(name, proximal, torch.zeros(5, dtype=torch.float64), mask, 2.0)


def test_truncation_caps_the_weight_and_says_where():
    correction = corrected("token_truncate")
    assert correction.weights.tolist() == pytest.approx([0.1, 1.0, 1.9, 2.0, 2.0])
    assert correction.truncated.tolist() == [False, False, False, True, True]


def test_masking_drops_what_is_over_the_cap_and_leaves_the_rest():
    correction = corrected("token_mask")
    assert correction.weights.tolist() == pytest.approx([0.1, 1.0, 1.9, 0.0, 0.0])
    assert correction.truncated.tolist() == [False, False, False, True, True]


def test_no_correction_weighs_every_token_the_same():
    correction = corrected("none")
    assert correction.weights.tolist() == [1.0] * 5
    assert not correction.truncated.any()


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_weights_carry_no_gradient(name):
    assert not corrected(name).weights.requires_grad


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_a_masked_place_has_weight_one_whatever_stands_there(name):
    proximal = torch.tensor([math.inf, -math.inf, math.nan])
    correction = correct(name, proximal, torch.zeros(3), torch.zeros(3, dtype=torch.bool), 2.0)
    assert correction.weights.tolist() == [1.0] * 3
    assert not correction.truncated.any()


def test_the_exponential_is_finite_for_any_log_ratio_and_exact_inside_the_limit():
    ratios = safe_exp(torch.tensor([-math.inf, -LOG_RATIO_LIMIT, 0.0, 3.0, 1e30, math.inf]))
    assert torch.isfinite(ratios).all()
    assert ratios[2:4].tolist() == pytest.approx([1.0, math.exp(3.0)])
