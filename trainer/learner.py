"""One rank of the learner: a DeepSpeed engine that turns a batch of rollouts into one optimizer step.

A plain class. Each rank lives in a process of its own (:mod:`trainer.learner_group` puts it in a Ray actor), and every
method is a collective: all ranks call it with the same arguments. DeepSpeed and transformers are imported when a
learner is made, not when this module is.
"""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.batching import BatchPlan, MicroBatch, Row, TrainRollout, build_micro_batch, plan_micro_batches
from trainer.config import AlgorithmConfig, LearnerConfig, OptimizerConfig
from trainer.diagnostics import DiagnosticSums, diagnostic_metrics, zero_sums
from trainer.objectives import TokenBatch, policy_loss
from trainer.policy import PolicyModel

logger = logging.getLogger(__name__)

_CHECKPOINT_TAG = "learner"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class NonFiniteError(RuntimeError):
    """The loss or a gradient is NaN or infinite. No optimizer step was taken; the weights are as before."""


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """Everything that all ranks of a learner share. Picklable."""

    model_path: str
    """A folder or hub id that transformers can load."""
    dtype: str = "float32"
    """Dtype of the forward pass: float32, or bfloat16 with float32 master weights."""
    device: str = "cpu"
    """cpu (collectives over gloo) or cuda (nccl; the rank's process sees its own GPU as the first)."""
    temperature: float = 1.0
    """The sampling temperature of the engines."""
    seed: int = 0
    trust_remote_code: bool = False
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)


class Learner:
    """Rank ``rank`` of ``world_size``. Construction is a rendezvous of all ranks at ``master_addr:master_port``.

    A process group that exists already is used, and left alone by :meth:`close`.
    """

    def __init__(self, spec: LearnerSpec, rank: int, world_size: int, master_addr: str, master_port: int) -> None:
        if spec.dtype not in _DTYPES:
            raise ValueError(f"model.dtype is {spec.dtype!r}; the learner trains in {' or '.join(_DTYPES)}")
        self.spec, self.rank, self.world_size = spec, rank, world_size
        _prepare_process(spec, rank, world_size, master_addr, master_port)
        import deepspeed

        self._owns_process_group = not dist.is_initialized()
        _join_process_group(spec, rank, world_size)
        self._device = torch.device(spec.device, 0) if spec.device == "cuda" else torch.device("cpu")
        policy = PolicyModel(_load_model(spec), spec.temperature, spec.learner.logprob_chunk)
        # About six times the hidden size: dense layers cost 24 H^2 a token and layer, attention 4 H per key.
        self._attention_tokens = 6.0 * policy.model.config.get_text_config().hidden_size
        if spec.learner.zero_stage == 3:
            # The policy reads the head's weight outside of the head's own forward.
            for parameter in policy.model.get_output_embeddings().parameters():
                deepspeed.zero.register_external_parameter(policy, parameter)
        self._engine, *_ = deepspeed.initialize(
            model=policy, optimizer=lambda parameters: _adamw(parameters, spec), config=deepspeed_config(spec)
        )

    @property
    def engine(self) -> Any:
        """The DeepSpeed engine; its module keeps the language model in attribute ``model``."""
        return self._engine

    @property
    def steps(self) -> int:
        """Optimizer steps taken. DeepSpeed also counts the steps that it refused."""
        return self._engine.global_steps - self._engine.skipped_steps

    def train(self, rollouts: Sequence[TrainRollout], version: int) -> dict[str, float]:
        """One optimizer step on a batch; the metrics of the whole batch, the same on every rank.

        ``version`` is the learner's policy version before the step. Rollouts whose loss contribution is exactly zero
        are not fed: they count in the denominators and in ``tokens/trained``, but not in ``mismatch/*`` and
        ``policy/entropy``. Raises :class:`NonFiniteError`, on every rank, instead of stepping on a loss or gradient
        that is not finite.
        """
        started = time.perf_counter()
        plan = self._plan(rollouts, self.world_size, self.spec.learner.packing)
        learning_rate = learning_rate_at(self.steps, self.spec.optimizer)
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
            "throughput/trained_tokens_per_second": plan.denominators.tokens / (finished - started),
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
            _save_tokenizer(self.spec, folder)
        dist.barrier()

    def close(self) -> None:
        """Release the engine and leave the process group. Does nothing a second time."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        engine.destroy()
        if self._owns_process_group:
            dist.destroy_process_group()

    def _plan(self, rollouts: Sequence[TrainRollout], ranks: int, packing: str) -> BatchPlan:
        return plan_micro_batches(
            rollouts, self.spec.learner.micro_batch_tokens, ranks, packing, self._attention_tokens
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
            micro = build_micro_batch(rows, version, plan.packing).to(self._device)
            self._engine.set_gradient_accumulation_boundary(number == len(mine) - 1)
            logprobs, entropy = self._forward(micro)
            batch = TokenBatch(logprobs, micro.behaviour_logprobs, micro.advantages, micro.loss_mask, micro.sequence)
            loss, sums = policy_loss(batch, entropy, self.spec.algorithm, plan.denominators)
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
        loss = totals.sums[0].item()
        what = f"policy/loss is {loss}" if not math.isfinite(loss) else f"policy/grad_norm is {gradient_norm}"
        where = f"; log-probabilities are not finite in rollouts {', '.join(broken[:8])}" if broken else ""
        return (
            f"{what} at optimizer step {self.steps}{where}. No step was taken. "
            "Look at optimizer.learning_rate, algorithm.correction_cap and the rollouts of this batch"
        )


def learning_rate_at(step: int, config: OptimizerConfig) -> float:
    """The learning rate of optimizer step ``step`` (from 0): linear warm-up over ``warmup_steps``, then constant."""
    return config.learning_rate * min(1.0, (step + 1) / max(config.warmup_steps, 1))


def deepspeed_config(spec: LearnerSpec) -> dict[str, Any]:
    """The DeepSpeed configuration of a spec.

    In bfloat16, ZeRO stage 0 becomes 1: DeepSpeed's stage 0 accumulates gradients in bfloat16, its stage 1 in float32.
    """
    bfloat16 = spec.dtype == "bfloat16"
    stage = max(spec.learner.zero_stage, 1) if bfloat16 else spec.learner.zero_stage
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # The true number differs from step to step: the learner sets the boundary and scales the loss itself.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": spec.optimizer.max_grad_norm if stage > 0 else 0.0,
        "zero_optimization": {"stage": stage},
    }
    if bfloat16:
        config |= {
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
        }
    return config


def _prepare_process(spec: LearnerSpec, rank: int, world_size: int, master_addr: str, master_port: int) -> None:
    """Environment, threads, seed and log levels of this rank's process, before DeepSpeed is imported."""
    if spec.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        # Ray sets OMP_NUM_THREADS=1 for an actor; the cores are shared out evenly unless the configuration says.
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(spec.learner.cpu_threads or max(1, cores // world_size))
    elif spec.learner.cpu_threads > 0:
        torch.set_num_threads(spec.learner.cpu_threads)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
    }
    if master_addr.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.manual_seed(spec.seed)
    from deepspeed.utils.logging import set_log_level_from_string
    from transformers.utils.logging import disable_progress_bar

    set_log_level_from_string("warning")
    disable_progress_bar()
    # DeepSpeed 0.19.8 calls names that torch 2.13 renamed, once for every bucket.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def _join_process_group(spec: LearnerSpec, rank: int, world_size: int) -> None:
    import deepspeed

    # On CPU, DeepSpeed would compile a shared-memory all-reduce that only its inference uses: half a minute of gcc.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="nccl" if spec.device == "cuda" else "gloo",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=spec.learner.timeout),
        verbose=False,
    )


def _load_model(spec: LearnerSpec) -> Any:
    """The causal language model in the forward dtype, with all dropout off: the engine samples without it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(spec.model_path, trust_remote_code=spec.trust_remote_code)
    for name, value in vars(config).items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)
    model = AutoModelForCausalLM.from_pretrained(
        spec.model_path,
        config=config,
        dtype=_DTYPES[spec.dtype],
        attn_implementation="sdpa",
        trust_remote_code=spec.trust_remote_code,
    )
    if spec.learner.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def _adamw(parameters: Any, spec: LearnerSpec) -> torch.optim.AdamW:
    """PyTorch's fused AdamW: one pass over the memory, on CPU and GPU, and no extension to compile."""
    optimizer = spec.optimizer
    return torch.optim.AdamW(
        parameters,
        lr=optimizer.learning_rate,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        fused=True,
    )


def _save_tokenizer(spec: LearnerSpec, folder: str | Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(spec.model_path, trust_remote_code=spec.trust_remote_code)
    except (OSError, ValueError) as error:
        logger.warning("the export in %s has no tokenizer: %s has none that loads (%s)", folder, spec.model_path, error)
        return
    tokenizer.save_pretrained(str(folder))
