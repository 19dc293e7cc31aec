import pytest

from generator.rollout import Group, Prompt, Rollout, ScoredRollout
from trainer.algorithm.advantages import ADVANTAGES
from trainer.algorithm.combinations import PART_BY_PART
from trainer.batch import Batch
from trainer.batch import make_batch as make
from trainer.config import AlgorithmConfig, FilterConfig

PROMPT = Prompt(0, (1, 2), "", {})


def make_batch(groups: list[Group], advantage: str, **filters) -> Batch:
    return make(groups, AlgorithmConfig(advantage=advantage, filter=FilterConfig(**filters)), max_tokens=4)


def scored(number: int, reward: float | None, tokens: int = 2) -> ScoredRollout:
    rollout = Rollout(
        id=str(number),
        prompt_token_ids=PROMPT.token_ids,
        response_token_ids=(5, 6, 7, 8)[:tokens],
        logprobs=(-1.0, -2.0, -1.0, -1.0)[:tokens],
        versions=(0, 1, 1, 1)[:tokens],
        loss_mask=(False, True, True, True)[:tokens],
        finish_reason="length" if tokens == 4 else "stop",
    )
    return ScoredRollout(rollout, "", reward, {})


def group(*rewards: float | None) -> Group:
    return Group(PROMPT, tuple(scored(number, reward) for number, reward in enumerate(rewards)), 0)


def test_advantages_are_computed_inside_each_group_and_returned_in_its_order():
    batch = make_batch([group(0.0, 1.0), group(10.0, 10.0)], "dr_grpo")
    assert batch.advantages == ((-0.5, 0.5), (0.0, 0.0))
    assert [row.advantage for row in batch.rollouts] == [-0.5, 0.5, 0.0, 0.0]
    assert [row.group for row in batch.rollouts] == [0, 0, 1, 1]


@pytest.mark.parametrize("name", PART_BY_PART)
def test_groups_that_come_part_by_part_get_the_numbers_and_advantages_that_they_have_in_the_batch(name):
    groups = [group(0.0, 1.0, 0.3), group(7.0, None, -2.0), group(10.0, 10.0, 10.0)]
    algorithm = AlgorithmConfig(advantage=name, filter=FilterConfig(zero_variance=True))
    whole = make(groups, algorithm, max_tokens=4).rollouts
    parts = [make([one], algorithm, max_tokens=4, first=number).rollouts for number, one in enumerate(groups)]
    assert tuple(row for part in parts for row in part) == whole


def test_a_rollout_keeps_its_columns_and_its_mask():
    row = make_batch([group(0.0, 1.0)], "grpo").rollouts[0]
    assert row.response_token_ids == (5, 6)
    assert row.logprobs == (-1.0, -2.0)
    assert row.versions == (0, 1)
    assert row.loss_mask == (False, True)


def test_a_rollout_without_a_reward_is_in_no_denominator_and_does_not_shift_the_mean():
    batch = make_batch([group(0.0, None, 1.0)], "dr_grpo")
    assert batch.advantages == ((-0.5, 0.0, 0.5),)
    assert batch.rollouts[1].loss_mask == (False, False)
    assert batch.rollouts[0].loss_mask == (False, True)


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"reward"}))
def test_a_better_rollout_has_the_larger_advantage(name):
    (first, second), _ = make_batch([group(0.2, 0.8), group(0.5, 0.5)], name).advantages
    assert first < 0 < second


def test_groups_without_signal_leave_the_denominators_where_the_filter_is_on():
    groups = [group(1.0, 1.0, None), group(0.0, 1.0)]
    batch = make_batch(groups, "grpo", zero_variance=True)
    assert batch.filtered == {"filter/zero_variance_rollouts": 2}
    assert [any(row.loss_mask) for row in batch.rollouts] == [False, False, False, True, True]
    assert [any(row.loss_mask) for row in make_batch(groups, "grpo").rollouts] == [True, True, False, True, True]


def test_a_rollout_cut_at_the_budget_is_not_learned_from_but_still_compared_with_where_it_is_masked():
    groups = [Group(PROMPT, (scored(0, 0.0, tokens=4), scored(1, 1.0)), 0)]
    batch = make_batch(groups, "dr_grpo", overlong="mask")
    assert batch.filtered == {"filter/overlong_rollouts": 1}
    assert batch.advantages == ((0.0, 0.5),)
    assert not any(batch.rollouts[0].loss_mask)


def test_a_rollout_pays_what_it_is_told_to_before_advantages_are_computed():
    groups = [group(1.0, 1.0, None), group(0.0, 1.0)]
    batch = make(groups, AlgorithmConfig(advantage="dr_grpo"), 4, [0.5, 0.0, 9.0, 0.0, 0.5])
    assert batch.advantages == ((-0.25, 0.25, 0.0), (-0.25, 0.25))
    assert batch.filtered == {"policy/kl_penalty_mean": 0.25}
    assert batch.groups[0].rollouts[0].reward == 1.0  # what is reported is the reward as it was given


def test_a_long_rollout_pays_with_reward_where_the_penalty_is_on():
    groups = [Group(PROMPT, (scored(0, 1.0, tokens=4), scored(1, 1.0)), 0)]
    batch = make_batch(groups, "dr_grpo", overlong="penalty", overlong_buffer=2, overlong_penalty=0.5)
    assert batch.filtered == {"filter/overlong_penalty_mean": 0.25}
    assert batch.advantages == ((-0.25, 0.25),)
    assert batch.groups[0].rollouts[0].reward == 1.0  # what is reported is the reward as it was given
