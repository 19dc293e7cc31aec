"""One rank of the learner: a DeepSpeed engine that turns a batch of rollouts into one step of one or more updates.

A plain class. Each rank lives in a process of its own (:mod:`trainer.learner_group` puts it in a Ray actor), and every
method is a collective: all ranks call it with the same arguments. DeepSpeed and transformers are imported when a
learner is made, not when this module is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.adapter_record import AdapterRecord
from trainer.algorithm.loss import learns_without_advantage
from trainer.batching import BatchPlan, plan_micro_batches
from trainer.config import AlgorithmConfig
from trainer.interrupt import Interrupt
from trainer.learner_checkpoint import export_model, load_learner, save_learner
from trainer.learner_setup import (
    LearnerSpec,
    adamw,
    deepspeed_config,
    join_process_group,
    load_model,
    prepare_process,
    register_head,
)
from trainer.logprob_pass import batch_logprobs, kl_penalties
from trainer.lora import adapters_off, add_adapters, fingerprint
from trainer.policy import PolicyModel
from trainer.reference_model import load_reference
from trainer.schedule import learning_rate_at
from trainer.step_metrics import StepResult, step_result
from trainer.train_rollout import (
    TrainRollout,
    split_minibatches,
    split_tokens,
    with_proximal,
    with_reference,
    with_second_moment_mask,
)
from trainer.update import Update, Updater


class Learner:
    """Rank ``rank`` of ``world_size``. Construction is a rendezvous of all ranks at ``master_addr:master_port``.

    A process group that exists already is used, and left alone by :meth:`close`.
    """

    def __init__(self, spec: LearnerSpec, rank: int, world_size: int, master_addr: str, master_port: int) -> None:
        self.spec, self.rank, self.world_size = spec, rank, world_size
        prepare_process(spec, rank, world_size, master_addr, master_port)
        import deepspeed

        self._owns_process_group = not dist.is_initialized()
        join_process_group(spec, rank, world_size)
        self._device = torch.device(spec.device, 0) if spec.device == "cuda" else torch.device("cpu")
        self._interrupt = Interrupt(world_size, self._device)
        self._algorithm = _algorithm(spec)
        self._steps_done = 0
        self._fed: list[TrainRollout] = []
        """Of the batch that is being filled: the rollouts whose gradients are there already."""
        self._fed_seen: list[TrainRollout] = []
        """The same with what the loss needs."""
        self._fed_seconds = 0.0
        wants_entropy_gradient = spec.algorithm.entropy_bonus != 0
        model = load_model(spec, spec.model_path)
        lora = spec.learner.lora
        self._record = AdapterRecord(lora, fingerprint(model) if lora.rank else "", spec.dtype)
        if lora.rank:
            add_adapters(model, lora)
        policy = PolicyModel(model, spec.temperature, spec.learner.logprob_chunk, wants_entropy_gradient)
        vocabulary = model.get_input_embeddings().weight.shape[0]
        # About six times the hidden size: dense layers cost 24 H^2 a token and layer, attention 4 H per key.
        self._attention_tokens = 6.0 * policy.model.config.get_text_config().hidden_size
        if spec.learner.zero_stage == 3:
            register_head(policy)
        self._interrupt.watch_layers(policy)
        self._engine, *_ = deepspeed.initialize(
            model=policy,
            model_parameters=[parameter for parameter in policy.parameters() if parameter.requires_grad],
            optimizer=lambda parameters: adamw(parameters, spec),
            config=deepspeed_config(spec),
        )
        self._wants_reference = spec.algorithm.kl.coefficient > 0
        # The weights that a run with adapters starts from are there already.
        self._base_is_reference = lora.rank > 0 and spec.algorithm.kl.model is None
        own_reference = self._wants_reference and not self._base_is_reference
        self._reference: Any = load_reference(spec, vocabulary, self._device) if own_reference else None
        if self._reference is not None:
            self._interrupt.watch_layers(self._reference)
        self._updater = Updater(
            self._engine, self._algorithm, spec.optimizer, rank, world_size, self._device, self._interrupt
        )

    @property
    def steps_done(self) -> int:
        """Batches learned from, those before a checkpoint was loaded included, and those with a skipped update."""
        return self._steps_done

    def interrupt(self) -> None:
        """Have a running :meth:`train` give up. Called on every rank, from any thread. See :class:`Interrupt`."""
        self._interrupt.set()

    @property
    def engine(self) -> Any:
        """The DeepSpeed engine; its module keeps the language model in attribute ``model``."""
        return self._engine

    def accumulate(self, rollouts: Sequence[TrainRollout], version: int) -> None:
        """Begin with the first rollouts of a batch, whole prompt groups, while the others are still being sampled.

        The gradients wait for :meth:`train`, which is called with the rest of the batch at the same ``version``; the
        step is that on the whole batch. Only for what ``trainer.algorithm.combinations.whole_batch_needed`` lets pass.
        When interrupted, raises ``InterruptedError``: no step was taken.
        """
        started = time.perf_counter()
        try:
            seen = self._before_updates(rollouts)
            self._updater.accumulate(self._plan(seen), version)
        except InterruptedError:
            raise self._given_up([]) from None
        self._fed += rollouts
        self._fed_seen += seen
        self._fed_seconds += time.perf_counter() - started

    def train(self, rollouts: Sequence[TrainRollout], version: int) -> StepResult:
        """One step: ``learner.epochs`` times ``learner.minibatches`` updates on a batch; its metrics, on every rank.

        The batch is ``rollouts`` and what was given to :meth:`accumulate` since the last step. ``version`` is the
        learner's policy version before the step. Rollouts whose loss contribution is exactly zero are not fed: they
        count in the denominators and in ``tokens/trained``, but not in ``mismatch/*`` and ``policy/entropy``. An update
        whose loss or gradient is not finite is skipped, on every rank, and named in the result; the others are made.
        When interrupted, raises ``InterruptedError``: before the first update the weights are as before and the step
        does not count, after it they are those of the updates made, and it does.
        """
        started = time.perf_counter()
        learning_rate = learning_rate_at(self._steps_done, self.spec.steps, self.spec.optimizer)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        updates: list[Update] = []
        settings = self.spec.learner
        seed = f"{self.spec.seed}/{self._steps_done}"
        try:
            seen = self._before_updates(rollouts)
            prepared = time.perf_counter()
            for part in split_minibatches(seen, settings.epochs, settings.minibatches, seed):
                updates.append(self._updater.update(self._plan(part), version))
        except InterruptedError:
            raise self._given_up(updates) from None
        self._steps_done += 1
        batch, batch_seen, earlier = [*self._fed, *rollouts], [*self._fed_seen, *seen], self._fed_seconds
        self._fed, self._fed_seen, self._fed_seconds = [], [], 0.0
        return step_result(
            batch, batch_seen, updates, settings.epochs, learning_rate, started - earlier, prepared - earlier
        )

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
        values = self._current_logprobs(rollouts, temperature=temperature)
        return [part.tolist() for part in split_tokens(values, rollouts)]

    def base_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """As :meth:`logprobs`, with the adapters off."""
        with adapters_off(self._engine.module):
            return self.logprobs(sequences)

    def kl_penalties(self, rollouts: Sequence[TrainRollout]) -> list[float]:
        """What ``algorithm.kl`` subtracts from the reward of each rollout, before the first update on them.

        Advantages are not looked at: they are computed afterwards. Raises ``RuntimeError`` without a reference.
        """
        if not self._wants_reference:
            raise RuntimeError("algorithm.kl.coefficient is 0: the learner has no reference model")
        current = self._current_logprobs(rollouts, feed_all=True)
        reference = self._reference_logprobs(rollouts, feed_all=True)
        return kl_penalties(rollouts, current, reference, self._algorithm.kl)

    def save(self, folder: str | Path) -> None:
        """Write weights, optimizer state and step count into ``folder``, from which :meth:`load` continues exactly.

        With adapters their weights alone are written, not those of the model that they are for.
        """
        save_learner(self._engine, self._record, folder, self._steps_done)

    def load(self, folder: str | Path) -> None:
        """Continue from a folder written by :meth:`save` at the same ZeRO stage, on as many ranks or on others.

        Raises ``FileNotFoundError`` when there is no learner checkpoint in it, and ``ValueError`` for one of another
        stage, of other adapters, or of an adapter to another model.
        """
        self._steps_done = load_learner(self._engine, self._record, folder)

    def export(self, folder: str | Path) -> None:
        """Write a folder that transformers and vLLM load directly: configuration, safetensors weights, tokenizer.

        Adapters are merged into the weights.
        """
        export_model(self._engine, self.spec, folder)

    def close(self) -> None:
        """Release the engine and leave the process group. Does nothing a second time."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        engine.destroy()
        if hasattr(self._reference, "destroy"):
            self._reference.destroy()
        if self._owns_process_group:
            dist.destroy_process_group()

    def _plan(self, rollouts: Sequence[TrainRollout], feed_all: bool = False) -> BatchPlan:
        packing: Any = self.spec.learner.packing  # one of the words, checked with the configuration
        return plan_micro_batches(
            rollouts,
            self.spec.learner.micro_batch_tokens,
            self.world_size,
            packing,
            self._attention_tokens,
            feed_all=feed_all or learns_without_advantage(self._algorithm),
        )

    def _before_updates(self, rollouts: Sequence[TrainRollout]) -> Sequence[TrainRollout]:
        """The rollouts with what the loss needs of the policy before the first update, and of the reference."""
        limit = self._algorithm.correction.second_moment
        if limit is not None or self._algorithm.proximal == "recomputed":
            before = self._current_logprobs(rollouts)
            if limit is not None:
                rollouts = with_second_moment_mask(rollouts, before, limit)
            if self._algorithm.proximal == "recomputed":
                rollouts = with_proximal(rollouts, before)
        if self._wants_reference and self._algorithm.kl.place == "loss":
            rollouts = with_reference(rollouts, self._reference_logprobs(rollouts))
        return rollouts

    def _reference_logprobs(self, rollouts: Sequence[TrainRollout], feed_all: bool = False) -> Tensor:
        """Of the reference model, ``[N]`` over all response tokens of the rollouts that are fed."""
        if not self._base_is_reference:
            return self._logprobs_under(self._reference, rollouts, feed_all)
        with adapters_off(self._engine.module):
            return self._current_logprobs(rollouts, feed_all)

    def _current_logprobs(
        self, rollouts: Sequence[TrainRollout], feed_all: bool = False, temperature: float | None = None
    ) -> Tensor:
        """Of the policy as it is, ``[N]`` over all response tokens of the rollouts that are fed."""
        self._engine.eval()
        values = self._logprobs_under(self._engine, rollouts, feed_all, temperature)
        self._engine.train()
        return values

    def _logprobs_under(
        self, model: Any, rollouts: Sequence[TrainRollout], feed_all: bool = False, temperature: float | None = None
    ) -> Tensor:
        plan = self._plan(rollouts, feed_all)
        look = self._interrupt.look
        return batch_logprobs(model, plan, rollouts, self.rank, self._device, look, temperature)

    def _given_up(self, updates: Sequence[Update]) -> InterruptedError:
        """What an interrupted step ends with. Once the weights changed it counts: no batch is learned from twice.

        No step follows, since an interrupt stays (:meth:`Interrupt.set`): what was accumulated need not be cleared.
        """
        self._engine.zero_grad()
        made = sum(not update.skipped for update in updates)
        if made == 0:
            return InterruptedError(f"optimizer step {self._steps_done + 1} was given up; no step was taken")
        self._steps_done += 1
        return InterruptedError(f"optimizer step {self._steps_done} was cut short after {made} update(s), and counts")


def _algorithm(spec: LearnerSpec) -> AlgorithmConfig:
    """The algorithm as the updates follow it. The policy before the only update of a batch is the current one, whose
    log-probabilities cost no pass of their own."""
    only_one = spec.learner.epochs * spec.learner.minibatches == 1
    if only_one and spec.algorithm.proximal == "recomputed":
        return replace(spec.algorithm, proximal="current")
    return spec.algorithm
