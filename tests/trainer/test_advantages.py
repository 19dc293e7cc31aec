"""Advantages against numbers worked out by hand, and the defined results at the edges."""

import math

import pytest
import torch

from trainer.advantages import ADVANTAGES, STD_EPSILON, compute_advantages

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


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_groups_do_not_touch_each_other_whatever_their_order(name):
    mixed = advantages([1.0, 10.0, 3.0, 30.0], [7, 2, 7, 2], name)
    assert [mixed[0], mixed[2]] == advantages([1.0, 3.0], [0, 0], name)
    assert [mixed[1], mixed[3]] == advantages([10.0, 30.0], [0, 0], name)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_a_group_of_one_and_a_group_of_equal_rewards_get_exactly_zero(name):
    assert advantages([0.7], [0], name) == [0.0]
    # 0.1 is no binary fraction: reward minus rounded mean would be 1e-17, and over a rounded deviation anything.
    assert advantages([0.1] * 7, [0] * 7, name) == [0.0] * 7


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_excluded_rollout_gets_zero_and_does_not_count_in_the_group(name):
    with_excluded = advantages([1.0, NAN, 3.0], [0, 0, 0], name)
    assert with_excluded[1] == 0.0
    assert [with_excluded[0], with_excluded[2]] == advantages([1.0, 3.0], [0, 0], name)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_a_group_with_one_scored_rollout_or_none_carries_no_signal(name):
    assert advantages([5.0, NAN, NAN], [0, 0, 1], name) == [0.0, 0.0, 0.0]


def test_an_infinite_reward_is_refused():
    with pytest.raises(ValueError, match="infinite"):
        advantages([1.0, math.inf], [0, 0], "grpo")
