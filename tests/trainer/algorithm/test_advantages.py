"""Advantages against numbers worked out by hand, and the defined results at the edges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.algorithm import reference
from trainer.algorithm.advantages import ADVANTAGES, STD_EPSILON, compute_advantages
from trainer.algorithm.combinations import GROUP_RELATIVE

NAN = math.nan


def advantages(rewards: list[float], groups: list[int], name: str) -> list[float]:
    return compute_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), name).tolist()


def test_grpo_divides_the_centred_reward_by_the_unbiased_group_deviation():
    # Mean 2, unbiased deviation sqrt(((-1)^2 + 0 + 1^2) / 2) = 1.
    assert advantages([1.0, 2.0, 3.0], [0, 0, 0], "grpo") == pytest.approx(
        [-1 / (1 + STD_EPSILON), 0.0, 1 / (1 + STD_EPSILON)], abs=1e-12
    )


def test_dr_grpo_only_subtracts_the_group_mean():
    assert advantages([1.0, 2.0, 6.0], [4, 4, 4], "dr_grpo") == pytest.approx([-2.0, -1.0, 3.0])


def test_rloo_subtracts_the_mean_of_the_other_rollouts():
    assert advantages([1.0, 2.0, 6.0], [0, 0, 0], "rloo") == pytest.approx([1 - 4.0, 2 - 3.5, 6 - 1.5])


def test_the_batch_deviation_scales_all_groups_alike():
    # All rewards: 0, 2, 5, 5, mean 3, unbiased variance (9 + 1 + 4 + 4) / 3 = 6.
    assert advantages([0.0, 2.0, 5.0, 5.0], [0, 0, 1, 1], "grpo_batch_std") == pytest.approx(
        [-1 / (6**0.5 + STD_EPSILON), 1 / (6**0.5 + STD_EPSILON), 0.0, 0.0]
    )


def test_reinforce_pp_compares_with_the_whole_batch_and_gives_a_lone_rollout_an_advantage():
    expected = [-1 / (1 + STD_EPSILON), 0.0, 1 / (1 + STD_EPSILON)]
    assert advantages([1.0, 2.0, 3.0], [0, 1, 2], "reinforce_pp") == pytest.approx(expected)
    assert advantages([0.1] * 5, [0, 0, 1, 1, 2], "reinforce_pp") == [0.0] * 5


def test_reinforce_pp_baseline_centres_in_the_group_and_scales_in_the_batch():
    # Centred: -1, 1, -3, 3; unbiased variance 20 / 3.
    scale = (20 / 3) ** 0.5 + STD_EPSILON
    assert advantages([1.0, 3.0, 0.0, 6.0], [0, 0, 1, 1], "reinforce_pp_baseline") == pytest.approx(
        [-1 / scale, 1 / scale, -3 / scale, 3 / scale]
    )


def test_the_plain_reward_is_the_advantage_but_for_an_excluded_rollout():
    assert advantages([1.0, NAN, -2.0], [0, 0, 1], "reward") == [1.0, 0.0, -2.0]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_groups_do_not_touch_each_other_whatever_their_order(name):
    mixed = advantages([1.0, 10.0, 3.0, 30.0], [7, 2, 7, 2], name)
    assert [mixed[0], mixed[2]] == advantages([1.0, 3.0], [0, 0], name)
    assert [mixed[1], mixed[3]] == advantages([10.0, 30.0], [0, 0], name)


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_a_group_of_one_and_a_group_of_equal_rewards_get_exactly_zero(name):
    assert advantages([0.7], [0], name) == [0.0]
    # 0.1 is no binary fraction: reward minus rounded mean would be 1e-17, and over a rounded deviation anything.
    assert advantages([0.1] * 7, [0] * 7, name) == [0.0] * 7


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_excluded_rollout_gets_zero_and_does_not_count_in_the_group(name):
    with_excluded = advantages([1.0, NAN, 3.0], [0, 0, 0], name)
    assert with_excluded[1] == 0.0
    assert [with_excluded[0], with_excluded[2]] == advantages([1.0, 3.0], [0, 0], name)


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_a_group_with_one_scored_rollout_or_none_carries_no_signal(name):
    assert advantages([5.0, NAN, NAN], [0, 0, 1], name) == [0.0, 0.0, 0.0]


def test_an_infinite_reward_is_refused():
    with pytest.raises(ValueError, match="infinite"):
        advantages([1.0, math.inf], [0, 0], "grpo")


@given(
    st.lists(st.tuples(st.one_of(st.none(), st.floats(-10, 10)), st.integers(0, 3)), min_size=1, max_size=12),
    st.sampled_from(sorted(ADVANTAGES)),
)
@settings(max_examples=150, deadline=None)
def test_any_rewards_in_any_groups_give_the_reference_and_the_order_does_not_matter(rows, name):
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    given_rewards = [NAN if r is None else round(r, 2) for r in rewards]
    expected = reference.advantages([None if r is None else round(r, 2) for r in rewards], groups, name)
    actual = advantages(given_rewards, groups, name)
    assert actual == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert advantages(given_rewards[::-1], groups[::-1], name) == pytest.approx(actual[::-1], rel=1e-9, abs=1e-12)


def not_finite(statistics):
    return statistics.rewards / 0.0


def test_a_function_of_the_users_may_compute_the_advantage_and_must_keep_it_finite():
    here = "tests.trainer.algorithm.test_advantages"
    assert advantages([1.0, 5.0], [0, 0], "trainer.algorithm.advantages.dr_grpo") == [-2.0, 2.0]
    with pytest.raises(ValueError, match=r"not_finite gave an advantage that is not finite"):
        advantages([1.0, 5.0], [0, 0], f"{here}.not_finite")
