"""What the value of each key may be, whatever the other keys are."""

from __future__ import annotations

import inspect
import ipaddress
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainer.dotted import DottedPathError, resolve_dotted
from trainer.nearest import nearest
from trainer.wording import clipped, shown

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

BELOW = {"optimizer.beta1": 1, "optimizer.beta2": 1}
"""What a number must stay below."""

AT_MOST = {
    "engine.gpu_memory_utilization": 1,
    "learner.zero_stage": 3,
    "engine.max_running": 2048,  # vLLM 0.32 computes so many tokens at a time, and refuses to run more sequences
    "engine.cpu_threads": 4096,
    "learner.cpu_threads": 4096,
    "weight_sync.bucket_mib": 4096,
}
"""The largest value of a number."""

LARGEST_INTEGER = 2**31 - 1
"""Of any integer: what the libraries behind take for seeds and sizes."""

LARGEST_NUMBER = 1e9
"""Of any other number, in both directions: timers cannot wait for longer, and in float32 such factors overflow."""

TEMPERATURES = (0.01, 2.0)
"""What vLLM 0.32 samples with: it raises what is lower to the first, unsaid (``_MAX_TEMP`` in its sampling_params.py),
while the learner would divide its logits by the lower one (L4); it refuses what is above the second."""


def problem(key: str, value: Any) -> str | None:
    """What is wrong with the value of one key, for people; ``None`` when all is well, as for a bound that is null."""
    if unreadable := next((text for text in _texts(value) if not _is_text(text)), None):
        return f"`{key}={unreadable!a}`: a text holds no NUL character and is valid Unicode"
    if key in EXTENSIBLE and "." in value:
        return _function_problem(key, value)
    number = key in OR_A_NUMBER
    if key in VALUES and value not in VALUES[key] and not (number and type(value) is int):
        words = f"{', '.join(VALUES[key])}{', or a whole number' if number else ''}"
        given = clipped(value) if isinstance(value, str) else shown(value)
        return f"`{key}={given}`: the value must be one of {words}{nearest(given, VALUES[key])}"
    if value == "":
        return f"`{key}=''`: the value is empty; leave the key out, or give it a value"
    if key in FORMS and value is not None and not FORMS[key][0](value):
        given = clipped(value) if isinstance(value, str) else shown(value)
        return f"`{key}={given}`: the value must be {FORMS[key][1]}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return _number_problem(key, value)


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(name)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _is_text(text: str) -> bool:
    """Whether files and processes can be given ``text``. Bytes of a command line that are no UTF-8 are surrogates."""
    return not any(character == "\0" or "\ud800" <= character <= "\udfff" for character in text)


def _is_host(value: str) -> bool:
    """An IP address or a host's name (RFC 1123)."""
    try:
        ipaddress.ip_address(value)
    except ValueError:
        label = r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?"
        return not re.fullmatch(r"[\d.]+", value) and bool(re.fullmatch(rf"{label}(\.{label})*", value))
    return True


def _is_cluster(value: str) -> bool:
    """``auto``, ``local``, or host and port, of a client's port after ``ray://``."""
    host, found, port = value.removeprefix("ray://").rpartition(":")
    with_port = bool(found) and port.isdecimal() and 0 < int(port[:6]) < 2**16 and _is_host(host.strip("[]"))
    return value in ("auto", "local") or with_port


def _is_core_list(value: str) -> bool:
    """``auto``, or for each worker ranges of cores, the first number of a range not above its last."""
    ranges = [part for worker in value.split("|") for part in worker.split(",")]
    pairs = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in ranges]
    return value == "auto" or all(pair is not None and int(pair[1]) <= int(pair[2] or pair[1]) for pair in pairs)


FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model.hub_id": (lambda value: bool(re.fullmatch(r"[\w.-]+/[\w.-]+", value)), "a hub id of the form owner/name"),
    "weight_sync.address": (lambda value: value == "auto" or _is_host(value), "auto, an IP address or a host name"),
    "ray.address": (_is_cluster, "auto, or an address of the form host:port or ray://host:port"),
    "engine.cpu_threads_bind": (_is_core_list, "auto, or the cores of each worker, such as 0-1|2-3"),
    "logger.wandb.project": (
        lambda value: len(value) <= 128 and not set(value) & set("/\\#?%:"),
        "a name of wandb: at most 128 characters, and none of / \\ # ? % :",
    ),
    "sampling.stop_token_ids": (
        lambda value: all(0 <= number <= LARGEST_INTEGER for number in value),
        "a list of token ids, which are not negative",
    ),
    "learner.lora.targets": (lambda value: all(name.strip() for name in value), "a list of names of linear layers"),
}
"""What the value of a key must look like: a test of it, and the words for it."""


def _number_problem(key: str, value: float) -> str | None:
    # Python writes out no integer of thousands of digits, and makes no float of one.
    huge = isinstance(value, int) and abs(value) > 10**30
    said = f"`{key}={'a number of more than 30 digits' if huge else value}`: the value must be"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{said} a finite number"
    if key in AT_LEAST and value < AT_LEAST[key]:
        return f"{said} at least {AT_LEAST[key]:g}"
    if key in POSITIVE and value <= 0:
        return f"{said} greater than 0"
    if key in BELOW and value >= BELOW[key]:
        return f"{said} below {BELOW[key]:g}"
    least, most = (-LARGEST_INTEGER, LARGEST_INTEGER) if isinstance(value, int) else (-LARGEST_NUMBER, LARGEST_NUMBER)
    if value < least:
        return f"{said} at least {least:,}"
    most = AT_MOST.get(key, most)
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
