"""One rank of the learner: a DeepSpeed engine that turns a batch of rollouts into one optimizer step.

A plain class. Each rank lives in a process of its own (:mod:`trainer.learner_group` puts it in a Ray actor), and every
method is a collective: all ranks call it with the same arguments. DeepSpeed and transformers are imported when a
learner is made, not when this module is.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.algorithm.diagnostics import DiagnosticSums, diagnostic_metrics, zero_sums
from trainer.algorithm.loss import learns_without_advantage, policy_loss
from trainer.algorithm.tokens import token_batch
from trainer.batching import BatchPlan, MicroBatch, Packing, Row, TrainRollout, build_micro_batch, plan_micro_batches
from trainer.learner_setup import (
    LearnerSpec,
    adamw,
    deepspeed_config,
    join_process_group,
    learning_rate_at,
    load_model,
    prepare_process,
    save_tokenizer,
)
from trainer.policy import PolicyModel

_CHECKPOINT_TAG = "learner"


class NonFiniteError(RuntimeError):
    """The loss or a gradient is NaN or infinite. No optimizer step was taken; the weights are as before."""


class Learner:
    """Rank ``rank`` of ``world_size``. Construction is a rendezvous of all ranks at ``master_addr:master_port``.

    A process group that exists already is used, and left alone by :meth:`close`.
    """

    def __init__(self, spec: LearnerSpec, rank: int, world_size: int, master_addr: str, master_port: int) -> None:
        self.spec, self.rank, self.world_size = spec, rank, world_size
        self._interrupted = threading.Event()
        prepare_process(spec, rank, world_size, master_addr, master_port)
        import deepspeed

        self._owns_process_group = not dist.is_initialized()
        join_process_group(spec, rank, world_size)
        self._device = torch.device(spec.device, 0) if spec.device == "cuda" else torch.device("cpu")
        wants_entropy_gradient = spec.algorithm.entropy_bonus != 0
        policy = PolicyModel(load_model(spec), spec.temperature, spec.learner.logprob_chunk, wants_entropy_gradient)
        # About six times the hidden size: dense layers cost 24 H^2 a token and layer, attention 4 H per key.
        self._attention_tokens = 6.0 * policy.model.config.get_text_config().hidden_size
        if spec.learner.zero_stage == 3:
            # The policy reads the head's weight outside of the head's own forward.
            for parameter in policy.model.get_output_embeddings().parameters():
                deepspeed.zero.register_external_parameter(policy, parameter)
        if world_size == 1:
            self._watch_layers(policy)
        self._engine, *_ = deepspeed.initialize(
            model=policy, optimizer=lambda parameters: adamw(parameters, spec), config=deepspeed_config(spec)
        )

    @property
    def steps_done(self) -> int:
        """Optimizer steps made, those before a checkpoint was loaded included; DeepSpeed counts refused ones too."""
        return int(self._engine.global_steps - self._engine.skipped_steps)

    def interrupt(self) -> None:
        """Have a running :meth:`train` give up. Called on every rank, from any thread.

        A single rank does so before its next layer, forward or backward; several, which must stay together, before
        their next micro-batch.
        """
        self._interrupted.set()

    def _watch_layers(self, policy: torch.nn.Module) -> None:
        """Look for an interrupt before each layer: on a slow machine a micro-batch takes longer than one may wait."""

        def look(*_: Any) -> None:
            if self._interrupted.is_set():
                raise self._given_up()

        for module in policy.modules():
            if isinstance(module, torch.nn.ModuleList):
                for layer in module:
                    layer.register_forward_pre_hook(look)
                    layer.register_full_backward_pre_hook(look)

    def _given_up(self) -> InterruptedError:
        return InterruptedError(f"optimizer step {self.steps_done + 1} was given up; no step was taken")

    @property
    def engine(self) -> Any:
        """The DeepSpeed engine; its module keeps the language model in attribute ``model``."""
        return self._engine

    def train(self, rollouts: Sequence[TrainRollout], version: int) -> dict[str, float]:
        """One optimizer step on a batch; the metrics of the whole batch, the same on every rank.

        ``version`` is the learner's policy version before the step. Rollouts whose loss contribution is exactly zero
        are not fed: they count in the denominators and in ``tokens/trained``, but not in ``mismatch/*`` and
        ``policy/entropy``. Raises :class:`NonFiniteError`, on every rank, instead of stepping on a loss or gradient
        that is not finite.
        """
        started = time.perf_counter()
        packing: Any = self.spec.learner.packing  # one of the words, checked with the configuration
        plan = self._plan(rollouts, self.world_size, packing)
        learning_rate = learning_rate_at(self.steps_done, self.spec.optimizer)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        totals, suspects = self._accumulate_gradients(plan, version)
        accumulated = time.perf_counter()
        gradient_norm = self._step()
        if not math.isfinite(gradient_norm):
            raise NonFiniteError(self._explain(totals, gradient_norm, suspects))
        finished = time.perf_counter()
        return diagnostic_metrics(totals) | {
            "policy/grad_norm": gradient_norm,
            "policy/learning_rate": learning_rate,
            "tokens/trained": plan.denominators.tokens,
            "tokens/fed": plan.fed_tokens,
            "tokens/padding_fraction": 1.0 - plan.fed_tokens / max(plan.padded_tokens, 1),
            "rollouts/without_signal": plan.skipped_rollouts,
            "timing/forward_backward_seconds": accumulated - started,
            "timing/optimizer_seconds": finished - accumulated,
            "throughput/learner_tokens_per_second": plan.denominators.tokens / (finished - started),
        }

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """For each token sequence, the log-probability of every token but the first; the same on every rank."""
        rollouts = [
            TrainRollout(
                id=str(number),
                group=number,
                prompt_token_ids=tuple(tokens[:1]),
                response_token_ids=tuple(tokens[1:]),
                logprobs=(0.0,) * (len(tokens) - 1),
                versions=(0,) * (len(tokens) - 1),
                loss_mask=(True,) * (len(tokens) - 1),
                advantage=1.0,
            )
            for number, tokens in enumerate(sequences)
        ]
        answers: list[list[float]] = [[] for _ in sequences]
        self._engine.eval()
        # Every rank computes everything: a handful of sequences is not worth a gather, and ZeRO-3 needs all ranks.
        for rows in self._plan(rollouts, 1, "padded").micro_batches[0]:
            micro = build_micro_batch(rows, 0, "padded").to(self._device)
            logprobs, _ = self._forward(micro, temperature)
            lengths = [len(row.rollouts[0].response_token_ids) for row in rows]
            for row, values in zip(rows, logprobs.split(lengths), strict=True) if rows else ():
                answers[row.rollouts[0].group] = values.tolist()
        self._engine.train()
        return answers

    def save(self, folder: str | Path) -> None:
        """Write weights, optimizer state and step count into ``folder``, from which :meth:`load` continues exactly."""
        self._engine.save_checkpoint(str(folder), tag=_CHECKPOINT_TAG, save_latest=False)

    def load(self, folder: str | Path) -> None:
        """Continue from a folder written by :meth:`save` with the same number of ranks and ZeRO stage.

        Raises ``FileNotFoundError`` when there is no learner checkpoint in it.
        """
        if not (Path(folder) / _CHECKPOINT_TAG).is_dir():
            raise FileNotFoundError(f"{folder} holds no learner checkpoint (no folder {_CHECKPOINT_TAG!r} in it)")
        loaded, _ = self._engine.load_checkpoint(str(folder), tag=_CHECKPOINT_TAG)
        if loaded is None:
            raise FileNotFoundError(f"the learner checkpoint in {folder} is incomplete; DeepSpeed could not read it")

    def export(self, folder: str | Path) -> None:
        """Write a folder that transformers and vLLM load directly: configuration, safetensors weights, tokenizer."""
        import deepspeed

        model = self._engine.module.model
        state: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            sharded = [parameter] if self.spec.learner.zero_stage == 3 else []
            with deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded)):
                if self.rank == 0:
                    state[name] = parameter.detach().cpu().clone() if sharded else parameter.detach().cpu()
        if self.rank == 0:
            state |= {name: buffer for name, buffer in model.state_dict().items() if name not in state}
            model.save_pretrained(str(folder), state_dict=state)
            save_tokenizer(self.spec, folder)
        dist.barrier()

    def close(self) -> None:
        """Release the engine and leave the process group. Does nothing a second time."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        engine.destroy()
        if self._owns_process_group:
            dist.destroy_process_group()

    def _plan(self, rollouts: Sequence[TrainRollout], ranks: int, packing: Packing) -> BatchPlan:
        return plan_micro_batches(
            rollouts,
            self.spec.learner.micro_batch_tokens,
            ranks,
            packing,
            self._attention_tokens,
            feed_all=learns_without_advantage(self.spec.algorithm),
        )

    def _forward(self, micro: MicroBatch, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        return self._engine(
            micro.input_ids,
            micro.position_ids,
            micro.attention_mask,
            micro.predictor_index,
            micro.targets,
            temperature,
        )

    def _accumulate_gradients(
        self, plan: BatchPlan, version: int
    ) -> tuple[DiagnosticSums, list[tuple[tuple[Row, ...], Tensor]]]:
        """Forward and backward over this rank's micro-batches: batch-level sums, and where log-probabilities broke."""
        totals = zero_sums(self._device)
        suspects: list[tuple[tuple[Row, ...], Tensor]] = []
        mine = plan.micro_batches[self.rank]
        for number, rows in enumerate(mine):
            if self._is_interrupted():
                self._engine.zero_grad()
                raise self._given_up()
            micro = build_micro_batch(rows, version, plan.packing).to(self._device)
            self._engine.set_gradient_accumulation_boundary(number == len(mine) - 1)
            logprobs, entropy = self._forward(micro)
            loss, sums = policy_loss(token_batch(micro, logprobs, entropy), self.spec.algorithm, plan.denominators)
            # An infinite loss may have a finite gradient. NaN in every gradient makes all ranks refuse the step, and
            # they all stay in step with the collectives of backward until then.
            poison = torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)
            # DeepSpeed averages gradients over ranks, but the shares of a loss with global denominators add up.
            self._engine.backward(loss * poison * self.world_size, scale_wrt_gas=False)
            suspects.append((rows, micro.sequence[micro.loss_mask & ~torch.isfinite(logprobs.detach())]))
            totals = totals + sums
        dist.all_reduce(totals.sums, op=dist.ReduceOp.SUM)
        dist.all_reduce(totals.maximum, op=dist.ReduceOp.MAX)
        return totals, suspects

    def _is_interrupted(self) -> bool:
        """Whether any rank was interrupted; all ranks agree, so that none is left alone in a collective."""
        flag = self._interrupted.is_set()
        if self.world_size == 1:
            return flag
        any_rank = torch.tensor(float(flag), device=self._device)
        dist.all_reduce(any_rank, op=dist.ReduceOp.MAX)
        return bool(any_rank)

    def _step(self) -> float:
        """Clip and step; the gradient norm before clipping. A norm that is not finite means that no step was taken."""
        if not self._engine.zero_optimization():
            # Without ZeRO, DeepSpeed neither reports the norm nor refuses a gradient that is not finite.
            limit = self.spec.optimizer.max_grad_norm or math.inf
            norm = float(torch.nn.utils.clip_grad_norm_(self._engine.module.parameters(), limit))
            if not math.isfinite(norm):
                self._engine.zero_grad()
                return norm
            self._engine.step()
            return norm
        self._engine.step()
        return float(self._engine.get_global_grad_norm()) if self._engine.was_step_applied() else math.inf

    def _explain(
        self, totals: DiagnosticSums, gradient_norm: float, suspects: list[tuple[tuple[Row, ...], Tensor]]
    ) -> str:
        """The message of a :class:`NonFiniteError`; a collective, since any rank may hold the cause."""
        mine = []
        for rows, sequences in suspects:
            rollouts = [rollout for row in rows for rollout in row.rollouts]
            mine += [rollouts[number].id for number in sequences.unique().tolist()]
        everyone: list[list[str]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(everyone, mine)
        broken = [id for ids in everyone for id in ids]
        what = f"policy/loss is {totals.loss}"
        if math.isfinite(totals.loss):
            what = f"policy/grad_norm is {gradient_norm}"
        where = f"; log-probabilities are not finite in rollouts {', '.join(broken[:8])}" if broken else ""
        return (
            f"{what} at optimizer step {self.steps_done}{where}. No step was taken. "
            "Look at optimizer.learning_rate, algorithm.correction.weight_high and the rollouts of this batch"
        )
