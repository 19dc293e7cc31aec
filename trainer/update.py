"""One optimizer update: gradients of all micro-batches, then a step, or none where something is not finite.

The micro-batches may be all of the batch, or come in parts while the rest of it is still being sampled
(``batch.streaming``). A part's gradient is that of a sum; what the batch is a mean over is known with the last part,
and divides the gradients before they are clipped (see :data:`trainer.algorithm.aggregation.COUNTED`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.algorithm.aggregation import counted
from trainer.algorithm.diagnostics import DiagnosticSums, zero_sums
from trainer.algorithm.loss import policy_loss
from trainer.algorithm.tokens import token_batch
from trainer.batching import BatchPlan, Row
from trainer.config import AlgorithmConfig, OptimizerConfig
from trainer.interrupt import Interrupt
from trainer.logprob_pass import forward
from trainer.micro_batch import build_micro_batch

Suspects = list[tuple[tuple[Row, ...], Tensor]]
"""Rows of a micro-batch, and the numbers of the rollouts in it whose log-probabilities are not finite."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one update did; the same on every rank, but for the times."""

    plan: BatchPlan
    sums: DiagnosticSums
    """Over all ranks."""
    gradient_norm: float
    """Before clipping; not finite where no step was taken."""
    skipped: str
    """Why no step was taken, for people; empty where one was."""
    gradient_seconds: float
    step_seconds: float


@dataclass(frozen=True, slots=True)
class _Part:
    """Gradients that are accumulated already."""

    plan: BatchPlan
    sums: DiagnosticSums
    """Over all ranks."""
    suspects: Suspects
    seconds: float

    def __add__(self, other: _Part) -> _Part:
        return _Part(
            self.plan + other.plan,
            self.sums + other.sums,
            self.suspects + other.suspects,
            self.seconds + other.seconds,
        )


class Updater:
    """Makes updates on a DeepSpeed engine. Every method is a collective of all ranks."""

    def __init__(
        self,
        engine: Any,
        algorithm: AlgorithmConfig,
        optimizer: OptimizerConfig,
        rank: int,
        world_size: int,
        device: torch.device,
        interrupt: Interrupt,
    ) -> None:
        self._engine, self._algorithm, self._optimizer = engine, algorithm, optimizer
        self._rank, self._world_size, self._device = rank, world_size, device
        self._interrupt = interrupt
        self._earlier: _Part | None = None
        """What was accumulated of the next update."""

    def accumulate(self, plan: BatchPlan, version: int) -> None:
        """Add the gradients of a part of the batch, made of whole prompt groups, to those of the next update.

        Raises ``InterruptedError`` when interrupted, and ``KeyError`` for an aggregation that needs the whole batch.
        """
        part = self._accumulate(plan, version, counted(plan.denominators, self._algorithm), last=False)
        self._earlier = part if self._earlier is None else self._earlier + part

    def update(self, plan: BatchPlan, version: int) -> Update:
        """Minimise the loss by one step; ``version`` is the learner's policy version.

        The batch is the planned rollouts and what was accumulated before. A loss or gradient that is not finite leaves
        weights and optimizer as they were, on every rank. Raises ``InterruptedError`` before the step when interrupted.
        """
        if self._earlier is None:
            whole, count = self._accumulate(plan, version, 1, last=True), 1
        else:
            last = self._accumulate(plan, version, counted(plan.denominators, self._algorithm), last=True)
            whole, self._earlier = self._earlier + last, None
            count = counted(whole.plan.denominators, self._algorithm)
        sums = whole.sums.with_loss_times(1.0 / count)
        started = time.perf_counter()
        with self._gradients_divided_by(count):
            norm = self._step()
        skipped = "" if math.isfinite(norm) else self._explain(sums, norm, whole.suspects)
        return Update(whole.plan, sums, norm, skipped, whole.seconds, time.perf_counter() - started)

    def _accumulate(self, plan: BatchPlan, version: int, weight: int, last: bool) -> _Part:
        """Forward and backward over this rank's micro-batches of the loss times ``weight``.

        ``last``: what DeepSpeed accumulates is complete then.
        """
        started = time.perf_counter()
        totals = zero_sums(self._device)
        suspects: Suspects = []
        mine = plan.micro_batches[self._rank]
        for number, rows in enumerate(mine):
            self._interrupt.look()
            micro = build_micro_batch(rows, version, plan.packing).to(self._device)
            self._engine.set_gradient_accumulation_boundary(last and number == len(mine) - 1)
            logprobs, entropy = forward(self._engine, micro)
            loss, sums = policy_loss(token_batch(micro, logprobs, entropy), self._algorithm, plan.denominators)
            # An infinite loss may have a finite gradient. NaN in every gradient makes all ranks refuse the step, and
            # they all stay in step with the collectives of backward until then.
            poison = torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)
            # DeepSpeed averages gradients over ranks, but the shares of a loss with global denominators add up.
            self._engine.backward(loss * poison * weight * self._world_size, scale_wrt_gas=False)
            suspects.append((rows, micro.sequence[micro.loss_mask & ~torch.isfinite(logprobs.detach())]))
            totals = totals + sums
        totals = totals.with_loss_times(weight)
        dist.all_reduce(totals.sums, op=dist.ReduceOp.SUM)
        dist.all_reduce(totals.maximum, op=dist.ReduceOp.MAX)
        return _Part(plan, totals, suspects, time.perf_counter() - started)

    @contextmanager
    def _gradients_divided_by(self, count: int) -> Iterator[None]:
        """What was accumulated counts as divided by ``count`` in the step that the body makes."""
        optimizer = self._engine.optimizer
        if count == 1:
            yield
        elif not self._engine.zero_optimization():
            for parameter in self._engine.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(count)
            yield
        elif hasattr(optimizer, "fp32_groups_gradients_flat"):  # bfloat16 with stage 1
            for gradients in optimizer.fp32_groups_gradients_flat:
                gradients.div_(count)
            yield
        else:
            # That is what a loss scale is to ZeRO: norm and gradients are divided by it before they are clipped.
            optimizer.loss_scale = float(count)
            try:
                yield
            finally:
                optimizer.loss_scale = 1.0

    def _step(self) -> float:
        """Clip and step; the gradient norm before clipping. A norm that is not finite means that no step was taken."""
        if not self._engine.zero_optimization():
            # Without ZeRO, DeepSpeed neither reports the norm nor refuses a gradient that is not finite.
            limit = self._optimizer.max_grad_norm or math.inf
            norm = float(torch.nn.utils.clip_grad_norm_(self._engine.module.parameters(), limit))
            if not math.isfinite(norm):
                self._engine.zero_grad()
                return norm
            self._engine.step()
            return norm
        self._engine.step()
        return float(self._engine.get_global_grad_norm()) if self._engine.was_step_applied() else math.inf

    def _explain(self, totals: DiagnosticSums, gradient_norm: float, suspects: Suspects) -> str:
        """Why a step was skipped; a collective, since any rank may hold the cause."""
        mine = []
        for rows, sequences in suspects:
            rollouts = [rollout for row in rows for rollout in row.rollouts]
            mine += [rollouts[number].id for number in sequences.unique().tolist()]
        everyone: list[list[str]] = [[] for _ in range(self._world_size)]
        dist.all_gather_object(everyone, mine)
        broken = [id for ids in everyone for id in ids]
        what = f"policy/loss is {totals.loss}"
        if math.isfinite(totals.loss):
            what = f"policy/grad_norm is {gradient_norm}"
        where = f"; log-probabilities are not finite in rollouts {', '.join(broken[:8])}" if broken else ""
        return (
            f"{what}{where}. "
            "Look at optimizer.learning_rate, algorithm.correction.weight_high and the rollouts of this batch"
        )
