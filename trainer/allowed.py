"""What the value of each key may be, whatever the other keys are."""

from __future__ import annotations

import inspect
import math
from typing import Any

from trainer.dotted import DottedPathError, resolve_dotted
from trainer.nearest import nearest

VALUES: dict[str, tuple[str, ...]] = {
    "hardware": ("auto", "cpu", "gpu", "cluster"),
    "model.dtype": ("auto", "float32", "bfloat16"),
    "staleness.on_expired": ("mask_tokens", "drop_rollout", "drop_group"),
    "algorithm.advantage": (
        "grpo",
        "grpo_batch_std",
        "dr_grpo",
        "rloo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "reward",
    ),
    "algorithm.objective": ("ppo_clip", "reinforce", "gspo", "cispo", "sapo", "dppo", "topr"),
    "algorithm.proximal": ("current", "behaviour", "recomputed", "log_linear"),
    "algorithm.correction.weight": ("none", "token", "sequence_product", "sequence_geometric"),
    "algorithm.correction.mask": ("none", "token", "sequence_product", "sequence_geometric"),
    "algorithm.aggregation": ("token_mean", "sequence_mean", "sequence_sum", "prompt_mean"),
    "algorithm.divergence": ("tv", "kl"),
    "algorithm.kl.estimator": ("k1", "k2", "k3"),
    "algorithm.kl.place": ("loss", "reward"),
    "algorithm.filter.overlong": ("none", "mask", "penalty"),
    "optimizer.schedule": ("constant", "linear", "cosine"),
    "learner.packing": ("shared_prompt", "padded"),
    "engine.on_failed": ("drop_rollout", "drop_group"),
    "weight_sync.mode": ("abort", "keep", "wait"),
    "weight_sync.kv_cache": ("recompute", "reuse"),
    "weight_sync.backend": ("auto", "gloo", "nccl", "ipc"),
    "weight_sync.staging_device": ("device", "host"),
    "weight_sync.lora": ("merged", "adapter"),
    "weight_sync.verify": ("none", "first", "every"),
    "evaluation.engine": ("shared", "dedicated"),
    "logger.wandb.mode": ("auto", "online", "offline", "disabled"),
}
"""The keys that take one of a few words. A test holds them against the registries that know what the words mean."""

OR_A_NUMBER = ("weight_sync.verify",)
"""Those of them that take a whole number instead of a word."""

EXTENSIBLE: dict[str, tuple[str, ...]] = {
    "algorithm.advantage": ("statistics",),
    "algorithm.objective": ("batch", "proximal", "algorithm"),
    "algorithm.correction.weight": ("log_ratio", "loss_mask", "sequence"),
    "algorithm.correction.mask": ("log_ratio", "loss_mask", "sequence"),
    "algorithm.aggregation": ("loss", "batch", "denominators", "algorithm"),
}
"""The keys that may also name a function of the user's by its dotted path, and what it is called with."""

AT_LEAST: dict[str, float] = {
    "seed": 0,
    "steps": 1,
    "batch.prompts": 1,
    "sampling.group_size": 1,
    "sampling.max_tokens": 1,
    "sampling.min_tokens": 0,
    "sampling.seed": 0,
    "sampling.temperature": 0,
    "sampling.top_k": 0,
    "sampling.min_p": 0,
    "staleness.max_versions": 0,
    "staleness.max_running_groups": 0,
    "algorithm.clip_low": 0,
    "algorithm.clip_high": 0,
    "algorithm.divergence_limit": 0,
    "algorithm.sum_length": 0,
    "algorithm.entropy_bonus": 0,
    "algorithm.correction.weight_low": 0,
    "algorithm.correction.mask_low": 0,
    "algorithm.correction.second_moment": 0,
    "algorithm.kl.coefficient": 0,
    "algorithm.filter.refill": 0,
    "algorithm.filter.overlong_buffer": 0,
    "algorithm.filter.overlong_penalty": 0,
    "optimizer.learning_rate": 0,
    "optimizer.warmup_steps": 0,
    "learner.epochs": 1,
    "learner.minibatches": 1,
    "learner.max_skipped_steps": 1,
    "learner.ranks": 1,
    "learner.zero_stage": 0,
    "learner.micro_batch_tokens": 1,
    "learner.logprob_chunk": 1,
    "learner.lora.rank": 0,
    "engine.count": 1,
    "engine.tensor_parallel": 1,
    "engine.max_running": 1,
    "engine.max_model_len": 0,
    "engine.rollout_tries": 1,
    "engine.max_restarts": 0,
    "weight_sync.bucket_mib": 1,
    "weight_sync.dense_every": 0,
    "weight_sync.verify": 1,
    "rewarding.workers": 1,
    "engine.kv_cache_mib": 0,
    "engine.cpu_threads": 0,
    "learner.cpu_threads": 0,
    "optimizer.weight_decay": 0,
    "optimizer.beta1": 0,
    "optimizer.beta2": 0,
    "logger.rollouts.every": 0,
    "logger.table.every": 0,
    "logger.table.rows": 0,
    "evaluation.every": 0,
    "evaluation.prompts": 0,
    "evaluation.rollouts": 1,
    "evaluation.temperature": 0,
    "evaluation.max_tokens": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
}
"""The smallest value of a number; those that may be null are not looked at then."""

POSITIVE = (
    "algorithm.gate_positive",
    "algorithm.gate_negative",
    "optimizer.max_grad_norm",
    "learner.timeout",
    "learner.lora.alpha",
    "engine.start_timeout",
    "engine.rollout_timeout",
    "sampling.repetition_penalty",
    "weight_sync.timeout",
    "weight_sync.drain_timeout",
    "rewarding.timeout",
    "watchdog.warn_after",
    "watchdog.fail_after",
    "shutdown.timeout",
    "optimizer.eps",
    "engine.gpu_memory_utilization",
)
"""Numbers that must be greater than 0."""

SMALLEST_ABOVE_0 = {"sampling.temperature": 0.01, "evaluation.temperature": 0.01}
"""The smallest value of a number that may be 0 too. vLLM 0.32 takes a lower temperature as this one (``_MAX_TEMP`` in
``vllm/sampling_params.py``), and the learner would divide its logits by another (L4)."""

BELOW = {"optimizer.beta1": 1, "optimizer.beta2": 1}
"""What a number must stay below."""

AT_MOST = {"engine.gpu_memory_utilization": 1, "learner.zero_stage": 3}
"""The largest value of a number."""

LARGEST_INTEGER = 2**31 - 1
"""Of any integer: what the libraries behind take for seeds and sizes."""


def problem(key: str, value: Any) -> str | None:
    """What is wrong with the value of one key, for people; ``None`` when all is well, as for a bound that is null."""
    if key in EXTENSIBLE and "." in value:
        return _function_problem(key, value)
    number = key in OR_A_NUMBER
    if key in VALUES and value not in VALUES[key] and not (number and type(value) is int):
        words = f"{', '.join(VALUES[key])}{', or a whole number' if number else ''}"
        return f"`{key}={value}`: the value must be one of {words}{nearest(str(value), VALUES[key])}"
    if value == "":
        return f"`{key}=''`: the value is empty; leave the key out, or give it a value"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return _number_problem(key, value)


def _number_problem(key: str, value: float) -> str | None:
    said = f"`{key}={value}`: the value must be"
    if not math.isfinite(value):
        return f"{said} a finite number"
    if key in AT_LEAST and value < AT_LEAST[key]:
        return f"{said} at least {AT_LEAST[key]:g}"
    if key in POSITIVE and value <= 0:
        return f"{said} greater than 0"
    if 0 < value < (smallest := SMALLEST_ABOVE_0.get(key, 0)):
        return f"{said} at least {smallest:g}, or 0: engines sample with {smallest:g} whatever lower one they are told"
    if key in BELOW and value >= BELOW[key]:
        return f"{said} below {BELOW[key]:g}"
    most = AT_MOST.get(key, LARGEST_INTEGER if isinstance(value, int) else math.inf)
    return f"{said} at most {most:,}" if value > most else None


def _function_problem(key: str, path: str) -> str | None:
    """A dotted path must name something that can be called with what the key's function is called with."""
    arguments = EXTENSIBLE[key]
    try:
        function = resolve_dotted(path, key)
        inspect.signature(function).bind(*arguments)
    except DottedPathError as error:
        return str(error)
    except (TypeError, ValueError) as error:
        return f"`{key}={path}` must name a function that can be called with ({', '.join(arguments)}): {error}"
    return None
