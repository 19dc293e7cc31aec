"""The whole loss against an independent float64 reference, and its behaviour at the extremes."""

import itertools
import math

import pytest
import torch

from tests.trainer.algorithm import reference
from tests.trainer.algorithm.cases import GROUPS, algorithm, assert_close, denominators, make_case, run, tokens
from trainer.algorithm.advantages import ADVANTAGES, compute_advantages
from trainer.algorithm.aggregation import AGGREGATIONS, Denominators
from trainer.algorithm.diagnostics import diagnostic_metrics
from trainer.algorithm.loss import learns_without_advantage, policy_loss
from trainer.algorithm.objectives import OBJECTIVES
from trainer.algorithm.proximal import PROXIMAL_POLICIES
from trainer.algorithm.ratios import LEVELS
from trainer.config import AlgorithmConfig, KLConfig

REWARDS = [1.0, 0.0, 0.3, -0.4, 0.9]

CORRECTIONS = {
    "none": {"weight": "none"},
    "truncated": {"weight": "token", "weight_high": 1.3},
    "two-sided": {"weight": "token", "weight_low": 0.8, "weight_high": 1.2},
    "icepop": {"weight": "token", "weight_high": None, "mask": "token", "mask_low": 0.7, "mask_high": 1.4},
    "product": {"weight": "sequence_product", "weight_high": 1.5, "mask": "sequence_product", "mask_low": 0.3},
    "geometric": {"weight": "token", "mask": "sequence_geometric", "mask_low": 0.8, "mask_high": 1.25},
    "mean": {"weight": "sequence_geometric", "weight_high": None},
}


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_value_and_gradient_equal_the_reference_for_every_correction_aggregation_and_advantage(objective):
    proximals = itertools.cycle(sorted(PROXIMAL_POLICIES))
    for advantage in sorted(ADVANTAGES):
        rewards = torch.tensor(REWARDS, dtype=torch.float64)
        values = compute_advantages(rewards, torch.tensor(GROUPS), advantage).tolist()
        assert values == pytest.approx(reference.advantages(list(REWARDS), list(GROUPS), advantage), rel=1e-9)
        case = make_case(values)
        for (name, correction), aggregation in itertools.product(CORRECTIONS.items(), sorted(AGGREGATIONS)):
            config = algorithm(
                correction, objective=objective, proximal=next(proximals), aggregation=aggregation, clip_high=0.28
            )
            loss, gradient, _ = run(case, config)
            expected = reference.loss_and_gradient(case, config)
            assert_close((loss, gradient), expected, (advantage, name, aggregation, config.proximal))


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
@pytest.mark.parametrize("proximal", sorted(PROXIMAL_POLICIES))
def test_value_and_gradient_equal_the_reference_for_every_proximal_policy_and_level(objective, proximal):
    for seed, (weight, mask) in enumerate(itertools.product(sorted(LEVELS), sorted(LEVELS))):
        case = make_case(seed=seed)
        bounds = {"weight_low": 0.7, "weight_high": 1.6, "mask_low": 0.5, "mask_high": 1.9}
        config = algorithm({"weight": weight, "mask": mask, **bounds}, objective=objective, proximal=proximal)
        loss, gradient, _ = run(case, config)
        assert_close((loss, gradient), reference.loss_and_gradient(case, config), (weight, mask))


@pytest.mark.parametrize(
    "keys",
    [
        {"objective": "ppo_clip", "clip_dual": 1.5},
        {"objective": "ppo_clip", "clip_low": None, "clip_high": None},
        {"objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
        {"objective": "gspo", "clip_dual": 1.1, "clip_low": None},
        {"objective": "cispo", "clip_low": None, "clip_high": 0.5},
        {"objective": "sapo", "gate_positive": 0.5, "gate_negative": 3.0},
        {"objective": "dppo", "divergence": "tv", "divergence_limit": 0.02},
        {"objective": "dppo", "divergence": "kl", "divergence_limit": 0.02},
    ],
)
def test_every_key_of_an_objective_acts_as_its_paper_says(keys):
    for seed in range(8):
        case = make_case(seed=seed)
        config = algorithm({"weight": "none"}, proximal="behaviour", **keys)
        assert_close(run(case, config)[:2], reference.loss_and_gradient(case, config), (seed, keys))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_penalty_and_entropy_bonus_equal_the_reference(estimator):
    case = make_case(seed=3)
    config = algorithm({"weight": "token"}, kl=KLConfig(0.3, estimator), entropy_bonus=0.05)
    assert_close(run(case, config)[:2], reference.loss_and_gradient(case, config), estimator)


def test_the_reference_itself_is_right_where_the_loss_can_be_worked_out_by_hand():
    case = make_case([1.0, 1.0, 1.0, 1.0, 1.0])
    config = algorithm({"weight": "none"}, objective="reinforce")
    seen = [x for x, m in zip(case.current, case.mask, strict=True) if m]
    loss, gradient = reference.loss_and_gradient(case, config)
    assert loss == pytest.approx(-sum(seen) / len(seen))
    assert gradient == pytest.approx([-m / len(seen) for m in case.mask])


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_a_good_token_becomes_more_likely_under_gradient_descent_and_a_bad_one_less(objective):
    case = make_case([1.0, 0.5, -1.0, 2.0, -0.5], spread=0.02)
    _, gradient, _ = run(case, algorithm({"weight": "none"}, objective=objective, proximal="behaviour"))
    for slope, advantage, seen in zip(gradient, case.advantages, case.mask, strict=True):
        assert math.copysign(1, -slope) == math.copysign(1, advantage) if seen else slope == 0


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
@pytest.mark.parametrize("difference", [80.0, -80.0, 2000.0, -2000.0])
def test_extreme_log_ratios_stay_finite(objective, difference):
    for proximal, level in itertools.product(sorted(PROXIMAL_POLICIES), sorted(LEVELS)):
        case = make_case()
        case.behaviour = [x - difference for x in case.current]
        case.proximal = [x - difference / 2 for x in case.current]
        case.reference = [x + difference for x in case.current]
        bounds = {"weight_high": None, "mask_low": 0.5, "mask_high": 2.0}
        config = algorithm({"weight": level, "mask": level, **bounds}, objective=objective, proximal=proximal)
        config.kl = KLConfig(0.1, "k3")
        loss, gradient, sums = run(case, config)
        assert math.isfinite(loss)
        assert all(map(math.isfinite, gradient))
        assert torch.isfinite(sums.sums).all()
        assert all(math.isfinite(value) for value in diagnostic_metrics(sums).values())


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan])
def test_nothing_that_stands_in_a_masked_place_reaches_the_loss_or_the_gradient(objective, garbage):
    for proximal, level in zip(sorted(PROXIMAL_POLICIES), sorted(LEVELS), strict=True):
        config = algorithm({"weight": level, "mask": level, "mask_high": 5.0}, objective=objective, proximal=proximal)
        expected = run(make_case(), config)[:2]
        for column in ("current", "behaviour", "proximal", "reference", "entropy"):
            case = make_case()
            values = getattr(case, column)
            setattr(case, column, [v if m else garbage for v, m in zip(values, case.mask, strict=True)])
            loss, gradient, sums = run(case, config)
            assert (loss, gradient) == expected
            assert torch.isfinite(sums.sums).all()


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_everything_masked_one_token_and_nothing_at_all_give_finite_losses(objective, aggregation):
    config = algorithm({"weight": "sequence_geometric"}, objective=objective, aggregation=aggregation)
    masked = make_case()
    masked.mask = [False] * len(masked.mask)
    assert run(masked, config)[:2] == (0.0, [0.0] * len(masked.mask))

    single = make_case()
    for column in vars(single):
        setattr(single, column, getattr(single, column)[:1])
    assert_close(run(single, config)[:2], reference.loss_and_gradient(single, config), "one token")

    empty = make_case()
    for column in vars(empty):
        setattr(empty, column, [])
    assert run(empty, config, Denominators(5, 2, (3, 2)))[:2] == (0.0, [])


@pytest.mark.parametrize("keys", [{}, {"clip_dual": 1.2}, {"objective": "dppo", "divergence_limit": 0.02}])
def test_clip_fractions_count_the_tokens_whose_gradient_the_bounds_removed(keys):
    case = make_case(seed=2, spread=1.2)
    _, gradient, sums = run(case, algorithm({"weight": "none"}, proximal="behaviour", **keys))
    metrics = diagnostic_metrics(sums)
    still = sum(slope == 0 for slope, seen in zip(gradient, case.mask, strict=True) if seen)
    assert still > 2
    clipped = metrics["policy/clip_fraction_low"] + metrics["policy/clip_fraction_high"]
    assert clipped == pytest.approx(still / sum(case.mask))


def test_a_broken_current_log_probability_is_not_hidden():
    case = make_case()
    case.current[0] = math.nan
    assert math.isnan(run(case, algorithm())[0])


def test_shares_of_micro_batches_add_up_to_the_loss_of_the_whole_batch():
    case = make_case(seed=5)
    for objective, aggregation in itertools.product(sorted(OBJECTIVES), sorted(AGGREGATIONS)):
        config = algorithm(
            {"weight": "sequence_product"}, objective=objective, aggregation=aggregation, proximal="recomputed"
        )
        whole = run(case, config)[:2]
        total, gradient = 0.0, []
        for number in range(len(set(case.sequence))):
            here = [t for t, s in enumerate(case.sequence) if s == number]
            part = make_case(seed=5)
            for column in vars(part):
                setattr(part, column, [getattr(case, column)[t] for t in here])
            part.sequence = [0] * len(here)
            loss, slopes, _ = run(part, config, denominators(case))
            total, gradient = total + loss, gradient + slopes
        assert_close((total, gradient), whole, (objective, aggregation))


def test_missing_log_probabilities_are_named():
    batch = tokens(make_case())
    without = type(batch)(**{name: getattr(batch, name) for name in batch.__slots__ if "reference" not in name})
    with pytest.raises(ValueError, match=r"algorithm\.kl\.coefficient"):
        policy_loss(without, algorithm(kl=KLConfig(0.1)), denominators(make_case()))
    without = type(batch)(**{name: getattr(batch, name) for name in batch.__slots__ if "proximal" not in name})
    with pytest.raises(ValueError, match=r"algorithm\.proximal is recomputed"):
        policy_loss(without, algorithm(proximal="recomputed"), denominators(make_case()))


def double_score(batch, proximal, algorithm):
    return (
        OBJECTIVES["reinforce"]
        .function(batch, proximal, algorithm)
        .__class__(-2.0 * batch.advantages * batch.logprobs, batch.loss_mask & False, batch.loss_mask & False)
    )


def sum_of_losses(loss, batch, denominators, algorithm):
    return loss.sum()


def test_a_dotted_path_puts_the_users_own_function_in_the_place_of_a_built_in_one():
    case = make_case([1.0] * 5)
    here = "tests.trainer.algorithm.test_loss"
    config = algorithm({"weight": "none"}, objective=f"{here}.double_score", aggregation=f"{here}.sum_of_losses")
    expected = -2.0 * sum(x for x, m in zip(case.current, case.mask, strict=True) if m)
    assert run(case, config)[0] == pytest.approx(expected)


def test_tokens_without_an_advantage_are_known_to_matter_where_a_regulariser_sees_them():
    assert not learns_without_advantage(AlgorithmConfig())
    assert learns_without_advantage(AlgorithmConfig(entropy_bonus=0.01))
    assert learns_without_advantage(AlgorithmConfig(kl=KLConfig(0.1)))
