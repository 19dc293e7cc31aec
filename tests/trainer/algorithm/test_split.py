"""The loss of real micro-batches: the same for every token budget, number of ranks and packing."""

import random
from dataclasses import replace

import pytest

from tests.trainer.algorithm.cases import algorithm
from trainer.algorithm.aggregation import AGGREGATIONS, counted
from trainer.algorithm.diagnostics import diagnostic_metrics, zero_sums
from trainer.algorithm.loss import learns_without_advantage, policy_loss
from trainer.algorithm.tokens import token_batch
from trainer.batching import BatchPlan, TrainRollout, plan_micro_batches
from trainer.config import AlgorithmConfig
from trainer.micro_batch import build_micro_batch

VERSION = 5


def rollouts() -> list[TrainRollout]:
    r = random.Random(0)
    made = []
    for group in range(3):
        for number in range(4):
            n = r.randint(1, 9)
            made.append(
                TrainRollout(
                    id=f"{group}.{number}",
                    group=group,
                    prompt_token_ids=(1,) * (group + 2),
                    response_token_ids=(2,) * n,
                    logprobs=tuple(-2.0 * r.random() for _ in range(n)),
                    versions=tuple(sorted(r.choices(range(VERSION + 1), k=n))),
                    loss_mask=tuple(r.random() < 0.8 for _ in range(n)),
                    advantage=0.0 if number == 3 else r.uniform(-1, 1),
                )
            )
    return made


def loss_and_slopes(config: AlgorithmConfig, budget: int, ranks: int, packing: str):
    """The batch loss, its gradient by the token's behaviour log-probability (which is unique), and the metrics."""
    plan = plan_micro_batches(rollouts(), budget, ranks, packing, feed_all=learns_without_advantage(config))
    loss, slopes, totals = 0.0, {}, zero_sums()
    for rows in (rows for rank in plan.micro_batches for rows in rank):
        micro = build_micro_batch(rows, VERSION, packing)
        # Any function of the token will do for the current policy, as long as it does not know the split.
        current = (0.8 * micro.behaviour_logprobs.double() - 0.1).requires_grad_()
        entropy = current.square()
        share, sums = policy_loss(token_batch(micro, current, entropy), config, plan.denominators)
        share.backward()
        loss += share.item()
        totals = totals + sums
        slopes |= dict(zip(micro.behaviour_logprobs.tolist(), current.grad.tolist(), strict=True))
    metrics = {k: v for k, v in diagnostic_metrics(totals).items() if k != "policy/loss"}
    return loss, {key: slope for key, slope in slopes.items() if slope}, metrics


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("entropy_bonus", [0.0, 0.01])
@pytest.mark.parametrize("objective", ["gspo", "dppo"])
def test_budget_ranks_and_packing_change_neither_loss_nor_gradient_nor_metrics(aggregation, entropy_bonus, objective):
    config = algorithm(
        {"weight": "sequence_product", "mask": "sequence_geometric", "mask_high": 1.2},
        objective=objective,
        proximal="log_linear",
        aggregation=aggregation,
        entropy_bonus=entropy_bonus,
    )
    loss, slopes, metrics = loss_and_slopes(config, 10_000, 1, "padded")
    assert len(slopes) > 10
    for budget, ranks, packing in [(10, 1, "padded"), (25, 2, "shared_prompt"), (60, 3, "shared_prompt")]:
        other = loss_and_slopes(config, budget, ranks, packing)
        assert other[0] == pytest.approx(loss, rel=1e-10)
        assert other[1] == pytest.approx(slopes, rel=1e-10)
        assert other[2] == pytest.approx(metrics, rel=1e-10)


def test_rollouts_without_an_advantage_are_fed_exactly_where_a_regulariser_needs_them():
    plain = plan_micro_batches(rollouts(), 1000, 1, "padded")
    everyone = plan_micro_batches(rollouts(), 1000, 1, "padded", feed_all=True)
    assert everyone.skipped_rollouts < 3 <= plain.skipped_rollouts
    assert everyone.denominators == plain.denominators


def test_the_prompts_of_a_batch_are_counted_from_all_their_rollouts_whatever_is_fed():
    plan = plan_micro_batches(rollouts(), 1000, 1, "padded")
    assert sum(plan.denominators.prompt_tokens) == plan.denominators.tokens
    assert plan.denominators.prompts == 3


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_parts_of_whole_groups_add_up_to_the_batch_once_their_sums_are_divided_by_its_count(aggregation):
    config = algorithm({"weight": "sequence_product"}, objective="ppo_clip", aggregation=aggregation)
    whole = plan_micro_batches(rollouts(), 10_000, 1, "padded")
    parts = [plan_micro_batches([r for r in rollouts() if r.group == n], 10_000, 1, "padded") for n in range(3)]
    joined = parts[0] + parts[1] + parts[2]
    assert joined.denominators == whole.denominators
    assert (joined.fed_tokens, joined.skipped_rollouts) == (whole.fed_tokens, whole.skipped_rollouts)
    shares = [counted(part.denominators, config) * loss_of(part, config) for part in parts]
    assert sum(shares) / counted(joined.denominators, config) == pytest.approx(loss_of(whole, config), rel=1e-10)


def test_a_part_that_the_loss_sees_nothing_of_adds_nothing():
    config = algorithm({"weight": "token"}, objective="ppo_clip")
    masked = [replace(r, loss_mask=(False,) * len(r.loss_mask)) for r in rollouts() if r.group == 0]
    seen = [r for r in rollouts() if r.group > 0]
    parts = [plan_micro_batches(part, 10_000, 1, "padded") for part in (masked, seen)]
    shares = [counted(part.denominators, config) * loss_of(part, config) for part in parts]
    count = counted((parts[0] + parts[1]).denominators, config)
    whole = loss_of(plan_micro_batches([*masked, *seen], 10_000, 1, "padded"), config)
    assert sum(shares) / count == pytest.approx(whole, rel=1e-10)


def loss_of(plan: BatchPlan, config: AlgorithmConfig) -> float:
    """The loss of a plan with its own denominators, under a policy that is a function of the token."""
    total = 0.0
    for rows in (rows for rank in plan.micro_batches for rows in rank):
        micro = build_micro_batch(rows, VERSION, plan.packing)
        current = 0.8 * micro.behaviour_logprobs.double() - 0.1
        total += policy_loss(token_batch(micro, current, current.square()), config, plan.denominators)[0].item()
    return total
