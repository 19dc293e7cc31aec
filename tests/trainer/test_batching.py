"""Micro-batches: the numbers of plain sequences through a real model, nothing lost, budgets kept, ranks in step."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.batching import BatchPlan, Packing, TrainRollout, plan_micro_batches
from trainer.learner_setup import attention_for
from trainer.logprob_pass import forward
from trainer.micro_batch import MicroBatch, build_micro_batch
from trainer.policy import PolicyModel

VOCABULARY = 23


def rollout(id: str, group: int, prompt: int, response: int, advantage: float = 1.0, **changes) -> TrainRollout:
    random_state = random.Random(f"{id}")
    prompt_ids = random.Random(group).choices(range(VOCABULARY), k=prompt)
    columns = {
        "response_token_ids": tuple(random_state.choices(range(VOCABULARY), k=response)),
        "logprobs": tuple(-random_state.random() for _ in range(response)),
        "versions": tuple(sorted(random_state.choices(range(3), k=response))),
        "loss_mask": (True,) * response,
    }
    return TrainRollout(id, group, tuple(prompt_ids), advantage=advantage, **(columns | changes))


def batch(groups: int = 3, size: int = 4) -> list[TrainRollout]:
    lengths = random.Random(0)
    return [
        rollout(f"{g}.{i}", g, 3 + 2 * g, lengths.randint(1, 9), advantage=1.0 + i)
        for g in range(groups)
        for i in range(size)
    ]


def built(plan: BatchPlan) -> list[MicroBatch]:
    return [build_micro_batch(rows, 5, plan.packing) for rank in plan.micro_batches for rows in rank]


def planned_rollouts(plan: BatchPlan) -> list[TrainRollout]:
    return [r for rank in plan.micro_batches for rows in rank for row in rows for r in row.rollouts]


@pytest.fixture(scope="module", params=["shared_prompt", "padded"])
def packing(request) -> Packing:
    return request.param


@pytest.fixture(scope="module", params=[None, 4], ids=["full attention", "a window of 4 tokens"])
def policy(packing, request) -> PolicyModel:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        sliding_window=request.param,
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention_for(packing),
    )
    model = MistralForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # sharp attention, so that one wrongly attended token shows
            parameter.mul_(8.0 if parameter.dim() == 2 else 1.0)
    return PolicyModel(model, temperature=0.7, chunk=5)


def plain_logprobs(policy: PolicyModel, r: TrainRollout) -> torch.Tensor:
    """By another attention than both packings have."""
    packed = policy.model.config._attn_implementation
    policy.model.set_attn_implementation("eager")
    ids = torch.tensor([r.prompt_token_ids + r.response_token_ids])
    log_p = torch.log_softmax(policy.model(input_ids=ids).logits[0].float() / policy.temperature, dim=-1)
    policy.model.set_attn_implementation(packed)
    first = len(r.prompt_token_ids) - 1
    return log_p[first:-1].gather(1, torch.tensor(r.response_token_ids)[:, None]).squeeze(1)


@torch.no_grad()
@pytest.mark.parametrize("budget", [1, 30, 10_000])
def test_log_probabilities_are_those_of_the_plain_sequence(policy, packing, budget):
    plan = plan_micro_batches(batch(), budget, 1, packing, attention_tokens=40)
    assert len(planned_rollouts(plan)) == 12
    for rows, micro in zip(plan.micro_batches[0], built(plan), strict=True):
        logprobs, _ = forward(policy, micro)
        expected = torch.cat([plain_logprobs(policy, r) for row in rows for r in row.rollouts])
        torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)


def test_the_prompt_of_a_group_is_fed_once():
    group = [rollout(str(i), 0, 10, 5) for i in range(4)]
    plan = plan_micro_batches(group, 1000, 1, "shared_prompt")
    assert plan.fed_tokens == plan.padded_tokens == 10 + 4 * 4
    assert plan_micro_batches(group, 1000, 1, "padded").fed_tokens == 4 * (10 + 4)


def test_a_group_over_the_budget_becomes_several_rows_of_even_length():
    group = [rollout(str(i), 0, 10, 6) for i in range(8)]
    plan = plan_micro_batches(group, 32, 1, "shared_prompt")
    lengths = [row.length for rows in plan.micro_batches[0] for row in rows]
    assert lengths == [10 + 4 * 5, 10 + 4 * 5]


def test_shared_rows_are_laid_out_without_padding():
    rollouts = [*batch(), rollout("long", 3, 5, 40)]
    plan = plan_micro_batches(rollouts, 10_000, 1, "shared_prompt")
    assert plan.padded_tokens == plan.fed_tokens == built(plan)[0].input_ids.numel()
    padded = plan_micro_batches(rollouts, 10_000, 1, "padded")
    assert padded.padded_tokens == built(padded)[0].input_ids.numel() > padded.fed_tokens


def test_a_group_is_cut_up_where_whole_it_would_leave_a_rank_with_nothing():
    group = [rollout(str(i), 0, 10, 11) for i in range(8)]
    plan = plan_micro_batches(group, 10_000, 2, "shared_prompt")
    assert [[row.length for rows in rank for row in rows] for rank in plan.micro_batches] == [[10 + 40]] * 2


def test_ranks_get_the_same_work_where_attention_makes_one_long_row_dearer_than_many_short_ones():
    rollouts = [rollout("long", 0, 1, 100), *(rollout(str(n), 1 + n, 1, 10) for n in range(40))]

    def tokens(attention_tokens: float) -> list[int]:
        plan = plan_micro_batches(rollouts, 1000, 2, "padded", attention_tokens)
        return [sum(row.length for rows in rank for row in rows) for rank in plan.micro_batches]

    assert tokens(math.inf) == [250, 250]  # dense layers alone: as many tokens here as there
    # Each token attends to half of its row on average: 100 tokens cost 100 + 100 * 50 / 25 = 300, and 10 cost 12. In
    # halves of 390 there are 32 or 33 short rows, and the long one with the 7 or 8 that are left.
    assert tokens(25.0) == [100 + 8 * 10, 32 * 10]


def test_a_rollout_over_the_budget_gets_a_micro_batch_of_its_own():
    plan = plan_micro_batches([rollout("a", 0, 3, 50), rollout("b", 1, 3, 5)], 20, 1, "padded")
    assert [[row.rollouts[0].id for row in rows] for rows in plan.micro_batches[0]] == [["a"], ["b"]]


def test_rollouts_that_cannot_change_the_loss_are_not_fed_but_counted():
    rollouts = [
        rollout("kept", 0, 3, 4, loss_mask=(False, True, True, True)),
        rollout("no advantage", 0, 3, 5, advantage=0.0),
        rollout("all masked", 0, 3, 2, loss_mask=(False, False)),
        rollout("empty", 0, 3, 0),
    ]
    plan = plan_micro_batches(rollouts, 100, 1, "shared_prompt")
    assert [r.id for r in planned_rollouts(plan)] == ["kept"]
    assert plan.skipped_rollouts == 3
    assert (plan.denominators.tokens, plan.denominators.sequences) == (3 + 5, 2)


def test_lags_are_the_learner_version_minus_the_version_of_each_token():
    plan = plan_micro_batches([rollout("a", 0, 2, 3, versions=(1, 1, 4))], 100, 1, "padded")
    assert built(plan)[0].lags.tolist() == [4, 4, 1]


def test_an_empty_micro_batch_runs_and_gives_zero_loss_with_zero_gradients(policy, packing):
    logprobs, _ = forward(policy, build_micro_batch((), 0, packing))
    logprobs.sum().backward()
    gradients = [parameter.grad for parameter in policy.parameters()]
    assert all(gradient is not None and gradient.abs().max() == 0 for gradient in gradients)
    policy.zero_grad(set_to_none=True)


def test_rollouts_of_one_group_with_different_prompts_are_refused():
    with pytest.raises(ValueError, match="group 0: its rollouts differ in their prompt"):
        plan_micro_batches([rollout("a", 0, 3, 4), rollout("b", 0, 4, 4)], 100, 1, "shared_prompt")


def test_columns_of_different_length_are_refused():
    with pytest.raises(ValueError, match="rollout a: the response columns differ"):
        rollout("a", 0, 3, 4, loss_mask=(True,))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(0, 20), max_size=5)), max_size=6),
    budget=st.integers(1, 80),
    ranks=st.integers(1, 4),
    packing=st.sampled_from(["shared_prompt", "padded"]),
    attention_tokens=st.sampled_from([1.0, 50.0, math.inf]),
)
def test_any_batch_is_split_without_loss_within_budget_and_with_ranks_in_step(
    sizes, budget, ranks, packing, attention_tokens
):
    rollouts = [rollout(f"{g}.{i}", g, prompt, n) for g, (prompt, ns) in enumerate(sizes) for i, n in enumerate(ns)]
    plan = plan_micro_batches(rollouts, budget, ranks, packing, attention_tokens)
    assert sorted(r.id for r in planned_rollouts(plan)) == sorted(r.id for r in rollouts if r.response_token_ids)
    assert len(plan.micro_batches) == ranks
    assert len({len(rank) for rank in plan.micro_batches}) == 1
    assert len(plan.micro_batches[0]) >= 1
    for rows, micro in zip((rows for rank in plan.micro_batches for rows in rank), built(plan), strict=True):
        one_rollout = len(rows) == 1 and len(rows[0].rollouts) == 1
        assert one_rollout or micro.input_ids.numel() <= max(budget, 1)
        expected = [token for row in rows for r in row.rollouts for token in r.response_token_ids]
        assert micro.targets.tolist() == expected
