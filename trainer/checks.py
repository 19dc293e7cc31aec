"""Cross-field checks of a composed configuration, and the readable errors of everything that can be wrong with it.

All of it runs before anything heavy starts. A :class:`ConfigError` is one paragraph: what is wrong, where, and the
nearest valid key or value.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator
from typing import Any

from trainer.config import AlgorithmConfig, Config

VALUES: dict[str, tuple[str, ...]] = {
    "hardware": ("auto", "cpu", "gpu", "cluster"),
    "model.dtype": ("auto", "float32", "bfloat16"),
    "staleness.on_expired": ("mask_tokens", "drop_rollout", "drop_group"),
    "algorithm.advantage": ("grpo", "dr_grpo", "rloo"),
    "algorithm.objective": ("ppo_clip", "reinforce"),
    "algorithm.proximal": ("current", "behaviour"),
    "algorithm.correction": ("token_truncate", "token_mask", "none"),
    "algorithm.aggregation": ("token_mean", "sequence_mean", "sequence_sum"),
    "learner.packing": ("shared_prompt", "padded"),
    "engine.on_failed": ("drop_rollout", "drop_group"),
    "weight_sync.mode": ("abort", "keep", "wait"),
    "weight_sync.kv_cache": ("recompute", "reuse"),
    "weight_sync.backend": ("auto", "gloo", "nccl"),
    "weight_sync.verify": ("none", "first", "every"),
    "logger.wandb.mode": ("auto", "online", "offline", "disabled"),
}
"""The keys that take one of a few words. A test holds them against the registries that know what the words mean."""

OR_A_NUMBER = ("weight_sync.verify",)
"""Those of them that take a whole number instead of a word."""

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
    "optimizer.learning_rate": 0,
    "optimizer.warmup_steps": 0,
    "learner.ranks": 1,
    "learner.zero_stage": 0,
    "learner.micro_batch_tokens": 1,
    "learner.logprob_chunk": 1,
    "engine.count": 1,
    "engine.tensor_parallel": 1,
    "engine.max_running": 1,
    "engine.max_model_len": 0,
    "engine.rollout_tries": 1,
    "engine.max_restarts": 0,
    "weight_sync.bucket_mib": 1,
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
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
}
"""The smallest value of a number."""

POSITIVE = (
    "algorithm.correction_cap",
    "optimizer.max_grad_norm",
    "learner.timeout",
    "engine.start_timeout",
    "engine.rollout_timeout",
    "sampling.repetition_penalty",
    "weight_sync.timeout",
    "weight_sync.drain_timeout",
    "rewarding.timeout",
    "shutdown.timeout",
    "optimizer.eps",
    "engine.gpu_memory_utilization",
)
"""Numbers that must be greater than 0."""

AT_MOST = {"engine.gpu_memory_utilization": 1, "learner.zero_stage": 3}
"""The largest value of a number."""

LARGEST_INTEGER = 2**31 - 1
"""Of any integer: what the libraries behind take for seeds and sizes."""


UNSUPPORTED: dict[str, str] = {
    "sampling.n": "every rollout is a request of its own; `sampling.group_size` says how many a prompt gets",
    "sampling.bad_words": "engines get token ids and have no tokenizer to tell words by, in every `weight_sync.mode`",
    "sampling.structured_outputs": "a grammar starts anew when `weight_sync.mode=abort` submits a rollout again, "
    "and in the other modes engines have no tokenizer to build it with; use `sampling.stop`, or reward the format",
    "sampling.logprobs": "the log-probability of every sampled token is recorded always",
}
"""Sampling parameters of vLLM that are refused by name, and why."""


class ConfigError(ValueError):
    """The configuration cannot be used. The message is for people; exit code 2."""


def all_keys(schema: type = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the schema, groups included."""
    keys = []
    for item in dataclasses.fields(schema):
        key = prefix + item.name
        keys.append(key)
        factory: Any = item.default_factory
        if isinstance(factory, type) and dataclasses.is_dataclass(factory):
            keys += all_keys(factory, key + ".")
    return keys


def nearest(word: str, candidates: Iterable[str]) -> str:
    """``"; did you mean `x`?"`` for the candidate closest to ``word``, or an empty string if none is close."""
    options = list(candidates)
    # A mistyped last part matters more than the path to it: `batch.promts` and `prompts` both mean `batch.prompts`.
    close = [option for option in options if _abbreviates(word, option)][:1]
    close = close or difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    if not close:
        tails = {option.rsplit(".", 1)[-1]: option for option in options}
        close = [tails[t] for t in difflib.get_close_matches(word.rsplit(".", 1)[-1], tails, n=1, cutoff=0.6)]
    return f"; did you mean `{close[0]}`?" if close else ""


def _abbreviates(word: str, option: str) -> bool:
    """Whether the last part of ``word`` is the initials of that of ``option``: `optimizer.lr` or `lr`."""
    path, _, tail = word.rpartition(".")
    option_path, _, option_tail = option.rpartition(".")
    return (
        "_" in option_tail
        and tail == "".join(part[:1] for part in option_tail.split("_"))
        and (path in ("", option_path))
    )


def check(config: Config) -> None:
    """Raise :class:`ConfigError` for the first value or combination that cannot work."""
    for key, allowed in VALUES.items():
        value = get(config, key)
        number = key in OR_A_NUMBER
        if value not in allowed and not (number and type(value) is int):
            hint = nearest(str(value), allowed)
            numbers = ", or a whole number" if number else ""
            raise ConfigError(f"`{key}={value}`: the value must be one of {', '.join(allowed)}{numbers}{hint}")
    for key, value in leaves(config):
        _check_leaf(key, value)
    for key in ("optimizer.beta1", "optimizer.beta2"):
        if get(config, key) >= 1:
            raise ConfigError(f"`{key}={get(config, key)}`: the value must be below 1")
    _check_sampling(config)
    _check_resumable(config)
    _check_algorithm(config)
    _check_parallelism(config)


def _check_leaf(key: str, value: Any) -> None:
    """What holds for the value of one key, whatever the others are."""
    if value == "":
        raise ConfigError(f"`{key}=''`: the value is empty; leave the key out, or give it a value")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not math.isfinite(value):
        raise ConfigError(f"`{key}={value}`: the value must be a finite number")
    if key in AT_LEAST and value < AT_LEAST[key]:
        raise ConfigError(f"`{key}={value}`: the value must be at least {AT_LEAST[key]:g}")
    if key in POSITIVE and value <= 0:
        raise ConfigError(f"`{key}={value}`: the value must be greater than 0")
    most = AT_MOST.get(key, LARGEST_INTEGER if isinstance(value, int) else math.inf)
    if value > most:
        raise ConfigError(f"`{key}={value}`: the value must be at most {most:,}")


def _check_sampling(config: Config) -> None:
    sampling = config.sampling
    if sampling.min_tokens > sampling.max_tokens:
        raise ConfigError(
            f"`sampling.min_tokens={sampling.min_tokens}` is more than `sampling.max_tokens={sampling.max_tokens}`"
        )
    if not 0 < sampling.top_p <= 1:
        raise ConfigError(f"`sampling.top_p={sampling.top_p}`: the value must be greater than 0 and at most 1")
    if sampling.temperature == 0:
        raise ConfigError(
            "`sampling.temperature=0`: greedy decoding makes every rollout of a group the same, so no advantage can be "
            "computed; use a temperature such as 1.0"
        )
    if sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0:
        # L5: the engine renormalises over the kept tokens, the learner's softmax runs over all of them.
        raise ConfigError(
            "`sampling.top_p`, `sampling.top_k` and `sampling.min_p` make the engine's log-probabilities incomparable "
            "with the learner's; leave them at 1.0, 0 and 0.0 for training"
        )
    if config.engine.max_model_len and config.engine.max_model_len <= sampling.max_tokens:
        raise ConfigError(
            f"`engine.max_model_len={config.engine.max_model_len}` leaves no room for a prompt beside "
            f"`sampling.max_tokens={sampling.max_tokens}`"
        )


def _check_resumable(config: Config) -> None:
    """What a resubmission cannot continue, and what samples from a distribution that the learner does not compute."""
    sampling, algorithm = config.sampling, config.algorithm
    if any(not string or "\N{REPLACEMENT CHARACTER}" in string for string in sampling.stop):
        raise ConfigError(f"`sampling.stop={sampling.stop}`: a stop string holds at least one character, and no U+FFFD")
    output_only = {"presence_penalty": sampling.presence_penalty, "frequency_penalty": sampling.frequency_penalty}
    for name, penalty in output_only.items():
        if not -2 <= penalty <= 2:
            raise ConfigError(f"`sampling.{name}={penalty}`: the value must lie between -2 and 2")
        if penalty and config.weight_sync.mode == "abort":
            raise ConfigError(
                f"`sampling.{name}={penalty}` counts the tokens of a request, and `weight_sync.mode=abort` continues a "
                "rollout in a new request, which would start to count again; use `weight_sync.mode=keep` or `wait`, or "
                "`sampling.repetition_penalty`, which works in every mode"
            )
    penalties = {"repetition_penalty": sampling.repetition_penalty - 1, **output_only}
    penalised = [f"`sampling.{name}`" for name, penalty in penalties.items() if penalty]
    if penalised and not _corrected(algorithm):
        # Unlike top-p, a penalty leaves every token a probability above 0, so an importance ratio is defined.
        raise ConfigError(
            f"{', '.join(penalised)}: penalties make the engine's log-probabilities incomparable with the learner's, "
            "which does not apply them; only an importance ratio against the engine makes up for that, so use "
            "`algorithm.correction=token_truncate`, or leave the penalties off"
        )


def _corrected(algorithm: AlgorithmConfig) -> bool:
    """Whether the loss holds the ratio between the current policy and what sampled the tokens."""
    return algorithm.correction != "none" or (algorithm.proximal == "behaviour" and algorithm.objective == "ppo_clip")


def _check_algorithm(config: Config) -> None:
    algorithm = config.algorithm
    if config.sampling.group_size == 1:
        raise ConfigError(
            f"`sampling.group_size=1`: the advantage `{algorithm.advantage}` compares the rollouts of a group, and one "
            "rollout has nothing to be compared with; use 2 or more"
        )
    if algorithm.clip_low >= 1:
        raise ConfigError(f"`algorithm.clip_low={algorithm.clip_low}`: the value must be below 1")
    if algorithm.proximal == "behaviour" and algorithm.correction != "none":
        raise ConfigError(
            "`algorithm.proximal=behaviour` already measures the ratio against the behaviour policy; with "
            f"`algorithm.correction={algorithm.correction}` it would be applied twice; use `algorithm.correction=none`"
        )
    if not _corrected(algorithm) and not algorithm.allow_uncorrected:
        # Invariant 11: engine and learner differ numerically even on-policy, so this holds for every bound.
        raise ConfigError(
            f"`algorithm.objective={algorithm.objective}` with `algorithm.proximal={algorithm.proximal}` and "
            "`algorithm.correction=none` trains off-policy data as if it were on-policy: the importance ratio is "
            "always 1. Use `algorithm.correction=token_truncate`, or ask for it with `algorithm.allow_uncorrected=true`"
        )


def _check_parallelism(config: Config) -> None:
    rollouts = config.batch.prompts * config.sampling.group_size
    if rollouts < config.learner.ranks:
        raise ConfigError(
            f"`learner.ranks={config.learner.ranks}` needs at least as many rollouts in a batch; "
            f"`batch.prompts={config.batch.prompts}` x `sampling.group_size={config.sampling.group_size}` is {rollouts}"
        )
    if config.hardware == "cpu" and config.weight_sync.backend == "nccl":
        raise ConfigError("`weight_sync.backend=nccl` needs GPUs; with `hardware=cpu` use `weight_sync.backend=gloo`")
    if config.hardware in ("gpu", "cluster") and config.weight_sync.backend == "gloo":
        raise ConfigError(
            f"`weight_sync.backend=gloo` is for CPU engines; with `hardware={config.hardware}` use "
            "`weight_sync.backend=nccl`"
        )


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with a value of its own, and the value."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, value


def get(config: Any, key: str) -> Any:
    """The value at a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config
