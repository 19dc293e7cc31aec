"""What a batch gains before its first update, and how it is split into the updates' shares."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm.second_moment import second_moment_mask
from trainer.batching import plan_micro_batches
from trainer.config import KLConfig
from trainer.logprob_pass import kl_penalties
from trainer.micro_batch import build_micro_batch
from trainer.train_rollout import (
    TrainRollout,
    split_minibatches,
    with_proximal,
    with_reference,
    with_second_moment_mask,
)


def rollout(id: str, group: int, tokens: int = 3, advantage: float = 1.0, **changes) -> TrainRollout:
    values = {
        "response_token_ids": tuple(range(tokens)),
        "logprobs": tuple(-0.5 * (n + 1) for n in range(tokens)),
        "versions": (0,) * tokens,
        "loss_mask": (True,) * tokens,
    }
    return TrainRollout(id, group, (1, 2), advantage=advantage, **(values | changes))


def batch(groups: int = 5, size: int = 2) -> list[TrainRollout]:
    return [rollout(f"{g}.{n}", g, tokens=1 + g + n, advantage=(-1.0) ** n) for g in range(groups) for n in range(size)]


def groups_of(parts: list[list[TrainRollout]]) -> list[list[int]]:
    return [list(dict.fromkeys(r.group for r in part)) for part in parts]


@given(groups=st.integers(1, 9), epochs=st.integers(1, 3), minibatches=st.integers(1, 9), seed=st.text(max_size=3))
def test_each_epoch_holds_every_rollout_once_in_even_shares_of_whole_groups(groups, epochs, minibatches, seed):
    parts = split_minibatches(batch(groups), epochs, minibatches, seed)
    shares = min(minibatches, groups)
    assert len(parts) == epochs * shares
    for epoch in range(epochs):
        mine = parts[epoch * shares : (epoch + 1) * shares]
        assert sorted(r.id for part in mine for r in part) == sorted(r.id for r in batch(groups))
        counts = [len(numbers) for numbers in groups_of(mine)]
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == groups


def test_the_order_of_groups_depends_on_the_seed_and_the_epoch_alone():
    parts = split_minibatches(batch(8), 2, 4, "7/0")
    assert parts == split_minibatches(batch(8), 2, 4, "7/0")
    assert groups_of(parts) != groups_of(split_minibatches(batch(8), 2, 4, "7/1"))
    assert groups_of(parts[:4]) != groups_of(parts[4:])


def test_one_minibatch_is_the_batch_in_its_own_order():
    assert split_minibatches(batch(), 2, 1, "0") == [batch(), batch()]


def test_a_batch_without_rollouts_is_one_empty_update_in_which_every_rank_takes_part():
    assert split_minibatches([], 1, 4, "0") == [[]]


def test_log_probabilities_of_a_pass_come_back_with_the_tokens_of_their_rollouts():
    rollouts = [rollout("a", 0, 2), rollout("empty", 0, 0), rollout("b", 1, 3)]
    proximal, reference = torch.arange(5.0), -torch.arange(5.0)
    carried = with_reference(with_proximal(rollouts, proximal), reference)
    assert [r.proximal_logprobs for r in carried] == [(0.0, 1.0), (), (2.0, 3.0, 4.0)]
    plan = plan_micro_batches(carried, 100, 1, "padded")
    micro = build_micro_batch(plan.micro_batches[0][0], 0, "padded")
    assert micro.proximal_logprobs.tolist() == [2.0, 3.0, 4.0, 0.0, 1.0]  # the longest row comes first
    assert micro.reference_logprobs.tolist() == [-2.0, -3.0, -4.0, 0.0, -1.0]


def test_a_micro_batch_has_a_column_only_where_its_rollouts_do():
    assert (
        build_micro_batch(plan_micro_batches(batch(), 1000, 1, "padded").micro_batches[0][0], 0, "padded")
        .to("cpu")
        .proximal_logprobs
        is None
    )
    some = [*with_proximal([rollout("a", 0)], torch.zeros(3)), rollout("b", 0)]
    with pytest.raises(ValueError, match="some rollouts"):
        build_micro_batch(plan_micro_batches(some, 1000, 1, "padded").micro_batches[0][0], 0, "padded")


def test_a_column_of_another_length_is_refused():
    with pytest.raises(ValueError, match="rollout a: the response columns differ"):
        rollout("a", 0, proximal_logprobs=(0.0,))


def test_the_second_moment_mask_is_that_of_all_tokens_of_the_batch_at_once():
    chance = random.Random(0)
    rollouts = batch()
    tokens = sum(len(r.response_token_ids) for r in rollouts)
    behaviour = torch.tensor([value for r in rollouts for value in r.logprobs])
    current = behaviour + torch.tensor([chance.gauss(0.0, 0.5) for _ in range(tokens)])
    masked = with_second_moment_mask(rollouts, current, 0.04)
    advantages = torch.tensor([r.advantage for r in rollouts for _ in r.response_token_ids])
    expected = second_moment_mask(current - behaviour, advantages, torch.ones(tokens, dtype=torch.bool), 0.04)
    assert [seen for r in masked for seen in r.loss_mask] == expected.tolist()
    assert 0 < expected.sum() < tokens


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.3 - 0.1), ("k2", (0.09 + 0.01) / 2)])
def test_a_rollout_pays_the_coefficient_times_the_summed_kl_of_the_tokens_that_the_loss_sees(estimator, expected):
    rollouts = [rollout("a", 0, 3, loss_mask=(True, False, True)), rollout("empty", 0, 0), rollout("b", 1, 1)]
    reference = torch.tensor([-1.0, -1.0, -1.0, -2.0])
    current = reference + torch.tensor([0.3, 9.0, -0.1, 0.0])
    paid = kl_penalties(rollouts, current, reference, KLConfig(coefficient=0.5, estimator=estimator, place="reward"))
    assert paid == pytest.approx([0.5 * expected, 0.0, 0.0], rel=1e-6)
