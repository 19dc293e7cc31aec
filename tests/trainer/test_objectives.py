"""The policy loss against formulas written out by hand in float64, and its behaviour at the extremes."""

import math

import pytest
import torch

from trainer.aggregation import AGGREGATIONS, Denominators
from trainer.config import AlgorithmConfig
from trainer.corrections import CORRECTIONS
from trainer.objectives import OBJECTIVES, PROXIMAL_POLICIES, TokenBatch, policy_loss

CURRENT = [-1.0, -0.5, -2.0, -0.1, -3.0, -0.7]
BEHAVIOUR = [-1.2, -2.0, -1.5, -0.1, -1.0, -0.6]
ADVANTAGES = [1.0, 1.0, -0.5, -0.5, -0.5, 2.0]
MASK = [True, True, True, False, True, True]
SEQUENCE = [0, 0, 1, 1, 1, 2]
DENOMINATORS = Denominators(tokens=5, sequences=3)


def tokens(logprobs: torch.Tensor, **columns) -> TokenBatch:
    values = {"behaviour_logprobs": BEHAVIOUR, "advantages": ADVANTAGES} | columns
    return TokenBatch(
        logprobs,
        torch.tensor(values["behaviour_logprobs"], dtype=torch.float64),
        torch.tensor(values["advantages"], dtype=torch.float64),
        torch.tensor(columns.get("loss_mask", MASK)),
        torch.tensor(columns.get("sequence", SEQUENCE)),
    )


def value_and_gradient(algorithm: AlgorithmConfig, denominators: Denominators = DENOMINATORS, **columns):
    logprobs = torch.tensor(columns.pop("current", CURRENT), dtype=torch.float64, requires_grad=True)
    loss, sums = policy_loss(tokens(logprobs, **columns), torch.zeros_like(logprobs), algorithm, denominators)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient, sums


def reference(algorithm: AlgorithmConfig) -> tuple[float, list[float]]:
    """Loss and gradient, token by token with plain floats."""
    total, gradient = 0.0, []
    for t in range(len(CURRENT)):
        if not MASK[t]:
            gradient.append(0.0)
            continue
        advantage, to_behaviour = ADVANTAGES[t], math.exp(CURRENT[t] - BEHAVIOUR[t])
        ratio = 1.0 if algorithm.proximal == "current" else to_behaviour
        weight = to_behaviour if algorithm.proximal == "current" else 1.0
        if algorithm.correction == "none":
            weight = 1.0
        elif weight > algorithm.correction_cap:
            weight = algorithm.correction_cap if algorithm.correction == "token_truncate" else 0.0
        if algorithm.objective == "reinforce":
            loss, slope = -advantage * CURRENT[t], -advantage
        else:
            clipped = min(max(ratio, 1 - algorithm.clip_low), 1 + algorithm.clip_high)
            loss = -min(ratio * advantage, clipped * advantage)
            slope = -ratio * advantage if ratio * advantage <= clipped * advantage else 0.0
        in_sequence = sum(m for m, s in zip(MASK, SEQUENCE, strict=True) if s == SEQUENCE[t])
        share = {"token_mean": 1 / 5, "sequence_mean": 1 / (3 * in_sequence), "sequence_sum": 1 / 3}
        total += loss * weight * share[algorithm.aggregation]
        gradient.append(slope * weight * share[algorithm.aggregation])
    return total, gradient


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
@pytest.mark.parametrize("proximal", sorted(PROXIMAL_POLICIES))
@pytest.mark.parametrize("correction", sorted(CORRECTIONS))
@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_value_and_gradient_equal_the_formula(objective, proximal, correction, aggregation):
    algorithm = AlgorithmConfig(
        objective=objective, proximal=proximal, correction=correction, aggregation=aggregation, clip_high=0.28
    )
    loss, gradient, _ = value_and_gradient(algorithm)
    expected, expected_gradient = reference(algorithm)
    assert loss == pytest.approx(expected, rel=1e-12)
    assert gradient.tolist() == pytest.approx(expected_gradient, rel=1e-12)


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_a_good_token_becomes_more_likely_under_gradient_descent(objective):
    _, gradient, _ = value_and_gradient(AlgorithmConfig(objective=objective, correction="none"))
    assert [math.copysign(1, -g) for g, m in zip(gradient, MASK, strict=True) if m] == [1, 1, -1, -1, 1]


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
@pytest.mark.parametrize("proximal", sorted(PROXIMAL_POLICIES))
@pytest.mark.parametrize("correction", sorted(CORRECTIONS))
@pytest.mark.parametrize("difference", [80.0, -80.0, 2000.0, -2000.0])
def test_extreme_log_ratios_stay_finite(objective, proximal, correction, difference):
    algorithm = AlgorithmConfig(objective=objective, proximal=proximal, correction=correction)
    loss, gradient, sums = value_and_gradient(algorithm, behaviour_logprobs=[c - difference for c in CURRENT])
    assert math.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert torch.isfinite(sums.sums).all()


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
@pytest.mark.parametrize("proximal", sorted(PROXIMAL_POLICIES))
@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan])
def test_nothing_that_stands_in_a_masked_place_reaches_the_loss_or_the_gradient(objective, proximal, garbage):
    algorithm = AlgorithmConfig(objective=objective, proximal=proximal)
    expected_loss, expected_gradient, _ = value_and_gradient(algorithm)
    for column, values in (("behaviour_logprobs", BEHAVIOUR), ("current", CURRENT)):
        spoiled = [v if m else garbage for v, m in zip(values, MASK, strict=True)]
        loss, gradient, sums = value_and_gradient(algorithm, **{column: spoiled})
        assert loss == expected_loss
        assert torch.equal(gradient, expected_gradient)
        assert torch.isfinite(sums.sums).all()


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_everything_masked_gives_zero_loss_and_zero_gradient(aggregation):
    algorithm = AlgorithmConfig(aggregation=aggregation)
    loss, gradient, _ = value_and_gradient(algorithm, Denominators(0, 0), loss_mask=[False] * 6)
    assert loss == 0.0
    assert gradient.tolist() == [0.0] * 6


def test_a_broken_current_log_probability_is_not_hidden():
    loss, _, _ = value_and_gradient(AlgorithmConfig(), current=[math.nan, *CURRENT[1:]])
    assert math.isnan(loss)


def test_clip_fractions_count_the_tokens_whose_gradient_the_clip_removed():
    algorithm = AlgorithmConfig(proximal="behaviour", correction="none")
    _, gradient, sums = value_and_gradient(algorithm)
    from trainer.diagnostics import diagnostic_metrics

    metrics = diagnostic_metrics(sums)
    # Ratios e^0.2 and e^1.5 with A > 0 pass 1.2; e^-0.5 and e^-2 with A < 0 pass 0.8; e^-0.1 is inside.
    assert metrics["policy/clip_fraction_high"] == pytest.approx(2 / 5)
    assert metrics["policy/clip_fraction_low"] == pytest.approx(2 / 5)
    assert [g == 0 for g in gradient.tolist()] == [True, True, True, True, True, False]
