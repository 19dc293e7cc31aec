"""Passes without gradients: log-probabilities of a batch under the policy as it is, or under a frozen reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.algorithm.regularisers import kl_reward
from trainer.algorithm.tokens import TokenBatch
from trainer.batching import BatchPlan
from trainer.micro_batch import MicroBatch, build_micro_batch, token_columns
from trainer.train_rollout import TrainRollout, split_tokens

if TYPE_CHECKING:
    from trainer.config import KLConfig


def forward(model: Any, micro: MicroBatch, temperature: float | None = None) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of a micro-batch's response tokens, both ``[T]``.

    ``model`` is a :class:`trainer.policy.PolicyModel`, or a DeepSpeed engine around one.
    """
    logprobs, entropy = model(
        micro.input_ids,
        micro.position_ids,
        micro.attention_mask,
        micro.predictor_index,
        micro.targets,
        temperature,
        segments=micro.segments,
    )
    return logprobs, entropy


@torch.no_grad()
def batch_logprobs(
    model: Any,
    plan: BatchPlan,
    rollouts: Sequence[TrainRollout],
    rank: int,
    device: torch.device,
    look: Callable[[], None],
    temperature: float | None = None,
) -> Tensor:
    """Log-probabilities ``[N]`` float32 of all response tokens of ``rollouts``, in order, on the CPU of every rank.

    A collective: each rank runs its share of ``plan``, and ``look`` before each micro-batch. 0 for a rollout that the
    plan does not feed. ``model`` is as for :func:`forward`, in evaluation mode.
    """
    start, total = {}, 0
    for rollout in rollouts:
        start[rollout.id] = total
        total += len(rollout.response_token_ids)
    values = torch.zeros(total, dtype=torch.float32, device=device)
    for rows in plan.micro_batches[rank]:
        look()
        logprobs, _ = forward(model, build_micro_batch(rows, 0, plan.packing).to(device), temperature)
        fed = [rollout for row in rows for rollout in row.rollouts]
        for rollout, part in zip(fed, split_tokens(logprobs, fed), strict=True):
            values[start[rollout.id] : start[rollout.id] + len(part)] = part
    dist.all_reduce(values)  # every token has a value on one rank, and 0 on the others
    return values.cpu()


def kl_penalties(
    rollouts: Sequence[TrainRollout], current: Tensor, reference: Tensor, settings: KLConfig
) -> list[float]:
    """What to subtract from the reward of each rollout, see :func:`trainer.algorithm.regularisers.kl_reward`.

    ``current`` and ``reference`` are ``[N]`` float log-probabilities of all response tokens.
    """
    columns = token_columns(rollouts, version=0)
    batch = TokenBatch(
        logprobs=current.double(),
        behaviour_logprobs=columns["behaviour_logprobs"],
        advantages=columns["advantages"],
        loss_mask=columns["loss_mask"],
        sequence=columns["sequence"],
        group=columns["group"],
        lags=columns["lags"],
        entropy=torch.zeros_like(current),
        reference_logprobs=reference.double(),
    )
    return [part[0].item() if len(part) else 0.0 for part in split_tokens(kl_reward(batch, settings), rollouts)]
