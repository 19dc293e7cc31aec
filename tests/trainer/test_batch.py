import pytest

from generator.rollout import Group, Prompt, Rollout, ScoredRollout
from trainer.batch import make_batch

PROMPT = Prompt(0, (1, 2), "", {})


def scored(number: int, reward: float | None) -> ScoredRollout:
    rollout = Rollout(
        id=str(number),
        prompt_token_ids=PROMPT.token_ids,
        response_token_ids=(5, 6),
        logprobs=(-1.0, -2.0),
        versions=(0, 1),
        loss_mask=(False, True),
        finish_reason="stop",
    )
    return ScoredRollout(rollout, "", reward, {})


def group(*rewards: float | None) -> Group:
    return Group(PROMPT, tuple(scored(number, reward) for number, reward in enumerate(rewards)), 0)


def test_advantages_are_computed_inside_each_group_and_returned_in_its_order():
    batch = make_batch([group(0.0, 1.0), group(10.0, 10.0)], "dr_grpo")
    assert batch.advantages == ((-0.5, 0.5), (0.0, 0.0))
    assert [row.advantage for row in batch.rollouts] == [-0.5, 0.5, 0.0, 0.0]
    assert [row.group for row in batch.rollouts] == [0, 0, 1, 1]


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


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_a_better_rollout_has_the_larger_advantage(name):
    (first, second), _ = make_batch([group(0.2, 0.8), group(0.0, 0.0)], name).advantages
    assert first < 0 < second
