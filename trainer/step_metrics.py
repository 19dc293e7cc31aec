"""What a step of the learner has to tell: the metrics of all its updates together, and what was skipped. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.algorithm.diagnostics import diagnostic_metrics

if TYPE_CHECKING:
    from trainer.train_rollout import TrainRollout
    from trainer.update import Update


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step on one batch. Picklable."""

    metrics: dict[str, float]
    skipped: str = ""
    """Why an update was skipped, the first of them if there were several; empty when all were made."""


def step_result(
    rollouts: Sequence[TrainRollout],
    seen: Sequence[TrainRollout],
    updates: Sequence[Update],
    epochs: int,
    learning_rate: float,
    started: float,
    prepared: float,
) -> StepResult:
    """The metrics of a step over ``rollouts``, of which the loss saw what ``seen`` has in its masks.

    Loss and gradient norm are means over the updates that were made, ``NaN`` when none was; diagnostics are over all
    their tokens; ``tokens/trained`` counts the batch once, ``tokens/fed`` every pass. ``started`` and ``prepared``, the
    time of the first update, are of ``time.perf_counter``.
    """
    finished = time.perf_counter()
    made = [update for update in updates if not update.skipped]
    skipped = [update.skipped for update in updates if update.skipped]
    fed = sum(update.plan.fed_tokens for update in updates)
    padded = sum(update.plan.padded_tokens for update in updates)
    before, tokens = (sum(sum(rollout.loss_mask) for rollout in side) for side in (rollouts, seen))
    metrics = {
        **_means(made),
        "policy/learning_rate": learning_rate,
        "policy/updates": float(len(made)),
        "policy/skipped_updates": float(len(skipped)),
        "policy/second_moment_masked_fraction": 1.0 - tokens / max(before, 1),
        "tokens/trained": tokens,
        "tokens/fed": fed,
        "tokens/padding_fraction": 1.0 - fed / max(padded, 1),
        "rollouts/without_signal": sum(update.plan.skipped_rollouts for update in updates) // epochs,
        "timing/before_updates_seconds": prepared - started,
        "timing/forward_backward_seconds": sum(update.gradient_seconds for update in updates),
        "timing/optimizer_seconds": sum(update.step_seconds for update in updates),
        "throughput/learner_tokens_per_second": tokens / (finished - started),
    }
    return StepResult(metrics, next(iter(skipped), ""))


def _means(made: Sequence[Update]) -> dict[str, float]:
    if not made:
        return {"policy/loss": math.nan, "policy/grad_norm": math.nan}
    sums = made[0].sums
    for update in made[1:]:
        sums = sums + update.sums
    norm = sum(update.gradient_norm for update in made) / len(made)
    return diagnostic_metrics(sums, len(made)) | {"policy/grad_norm": norm}
