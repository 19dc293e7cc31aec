import math
import time
from typing import Any

import torch

from trainer.algorithm.diagnostics import DiagnosticSums, zero_sums
from trainer.batching import plan_micro_batches
from trainer.step_metrics import StepResult, step_result
from trainer.train_rollout import TrainRollout, split_minibatches
from trainer.update import Update
from trainer.watch.catalogue import unknown


def rollout(id: str, group: int, seen: tuple[bool, ...], advantage: float = 1.0) -> TrainRollout:
    n = len(seen)
    return TrainRollout(id, group, (1, 2), (3,) * n, (-1.0,) * n, (0,) * n, seen, advantage)


BATCH = [
    rollout("a", 0, (True, True)),
    rollout("b", 0, (True, False, True), advantage=0.0),
    rollout("c", 1, (True,)),
    rollout("d", 1, (False,)),
]


def update(part: list[TrainRollout], loss: float, norm: float, skipped: str = "") -> Update:
    plan = plan_micro_batches(part, 100, 1, "padded")
    sums = zero_sums()
    return Update(
        plan, DiagnosticSums(sums.sums.index_fill(0, torch.tensor([0]), loss), sums.maximum), norm, skipped, 2.0, 1.0
    )


def result(updates: list[Update], epochs: int, seen: Any = BATCH) -> StepResult:
    now = time.perf_counter()
    return step_result(BATCH, seen, updates, epochs, 0.5, now - 3.0, now - 1.0)


def test_updates_of_a_batch_are_averaged_or_added_up_and_its_tokens_count_once():
    parts = split_minibatches(BATCH, 2, 2, "0")
    metrics = result(
        [update(part, loss, 2 * loss) for part, loss in zip(parts, (1.0, 2.0, 3.0, 4.0), strict=True)], 2
    ).metrics
    assert (metrics["policy/loss"], metrics["policy/grad_norm"]) == (2.5, 5.0)
    assert (metrics["policy/updates"], metrics["policy/skipped_updates"]) == (4, 0)
    assert metrics["tokens/trained"] == 5
    assert metrics["tokens/fed"] == 2 * (2 + 1 + 2)
    assert metrics["rollouts/without_signal"] == 2
    assert metrics["timing/forward_backward_seconds"] == 8.0
    assert metrics["timing/optimizer_seconds"] == 4.0
    assert metrics["policy/second_moment_masked_fraction"] == 0.0
    assert not unknown(metrics)


def test_a_skipped_update_enters_no_mean_and_the_first_reason_is_told():
    updates = [
        update(BATCH, 1.0, 2.0),
        update(BATCH, math.nan, math.inf, "first"),
        update(BATCH, 1.0, math.inf, "second"),
    ]
    told = result(updates, 3)
    assert told.skipped == "first"
    assert (told.metrics["policy/loss"], told.metrics["policy/grad_norm"]) == (1.0, 2.0)
    assert (told.metrics["policy/updates"], told.metrics["policy/skipped_updates"]) == (1, 2)


def test_a_step_without_any_update_says_so_instead_of_reporting_a_loss_of_0():
    told = result([update(BATCH, math.nan, math.inf, "why")], 1)
    assert math.isnan(told.metrics["policy/loss"])
    assert math.isnan(told.metrics["policy/grad_norm"])
    assert told.metrics["policy/updates"] == 0


def test_tokens_that_were_dropped_before_the_first_update_are_no_trained_ones():
    seen = [rollout("a", 0, (False, True)), *BATCH[1:]]
    metrics = result([update(seen, 1.0, 2.0)], 1, seen).metrics
    assert metrics["tokens/trained"] == 4
    assert math.isclose(metrics["policy/second_moment_masked_fraction"], 1 / 5)
