"""Importance weights of the behaviour corrections, worked out by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from trainer.algorithm.corrections import Correction, correct
from trainer.algorithm.ratios import LEVELS, LOG_RATIO_LIMIT, safe_exp
from trainer.algorithm.tokens import TokenBatch
from trainer.config import CorrectionConfig

RATIOS = [0.1, 1.0, 1.9, 2.1, 50.0]
BATCH = TokenBatch(
    logprobs=torch.zeros(5, dtype=torch.float64),
    behaviour_logprobs=torch.zeros(5, dtype=torch.float64),
    advantages=torch.ones(5, dtype=torch.float64),
    loss_mask=torch.ones(5, dtype=torch.bool),
    sequence=torch.tensor([0, 0, 1, 1, 2]),
    group=torch.zeros(5, dtype=torch.int64),
    lags=torch.zeros(5, dtype=torch.int64),
    entropy=torch.zeros(5, dtype=torch.float64),
)


def corrected(**keys: Any) -> Correction:
    proximal = torch.tensor(RATIOS, dtype=torch.float64).log().requires_grad_()
    return correct(BATCH, proximal, CorrectionConfig(**keys))


def test_truncation_caps_the_weight_and_says_where():
    correction = corrected(weight="token", weight_high=2.0)
    assert correction.weights.tolist() == pytest.approx([0.1, 1.0, 1.9, 2.0, 2.0])
    assert correction.truncated.tolist() == [False, False, False, True, True]
    assert not correction.masked.any()


def test_two_sided_truncation_also_raises_small_weights():
    correction = corrected(weight="token", weight_low=0.5, weight_high=2.0)
    assert correction.weights.tolist() == pytest.approx([0.5, 1.0, 1.9, 2.0, 2.0])
    assert correction.truncated.tolist() == [True, False, False, True, True]


def test_a_mask_drops_what_is_outside_and_leaves_the_rest_as_it_is():
    correction = corrected(weight="token", weight_high=None, mask="token", mask_low=0.5, mask_high=2.0)
    assert correction.weights.tolist() == pytest.approx([0.0, 1.0, 1.9, 0.0, 0.0])
    assert correction.masked.tolist() == [True, False, False, True, True]
    assert not correction.truncated.any()


def test_a_sequence_product_weighs_all_tokens_of_a_rollout_alike():
    correction = corrected(weight="sequence_product", weight_high=5.0)
    assert correction.weights.tolist() == pytest.approx([0.1, 0.1, 1.9 * 2.1, 1.9 * 2.1, 5.0])


def test_a_geometric_mask_leaves_whole_rollouts_out_whatever_the_weight():
    correction = corrected(weight="token", weight_high=None, mask="sequence_geometric", mask_low=0.5, mask_high=3.0)
    # Geometric means: sqrt(0.1) = 0.32, sqrt(3.99) = 2.0, 50.
    assert correction.weights.tolist() == pytest.approx([0.0, 0.0, 1.9, 2.1, 0.0])


def test_no_correction_weighs_every_token_the_same():
    correction = corrected(weight="none")
    assert correction.weights.tolist() == [1.0] * 5
    assert not correction.truncated.any()


@pytest.mark.parametrize("level", sorted(LEVELS))
def test_weights_carry_no_gradient(level):
    assert not corrected(weight=level, mask=level, mask_high=3.0).weights.requires_grad


@pytest.mark.parametrize("level", sorted(LEVELS))
def test_a_masked_place_has_weight_one_and_does_not_touch_its_rollout(level):
    mask = torch.tensor([True, False, False, False, False])
    proximal = torch.tensor([0.0, math.inf, -math.inf, math.nan, 9.0], dtype=torch.float64)
    correction = correct(replace(BATCH, loss_mask=mask), proximal, CorrectionConfig(weight=level, mask=level))
    assert correction.weights.tolist() == [1.0] * 5
    assert not correction.truncated.any()


def test_the_exponential_is_finite_for_any_log_ratio_and_exact_inside_the_limit():
    ratios = safe_exp(torch.tensor([-math.inf, -LOG_RATIO_LIMIT, 0.0, 3.0, 1e30, math.inf]))
    assert torch.isfinite(ratios).all()
    assert ratios[2:4].tolist() == pytest.approx([1.0, math.exp(3.0)])
