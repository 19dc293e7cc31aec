"""Cross-field checks of a composed configuration, and the readable errors of everything that can be wrong with it.

All of it runs before anything heavy starts. A :class:`ConfigError` is one paragraph: what is wrong, where, and the
nearest valid key or value.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Iterable
from typing import Any

from trainer.algorithm import combinations
from trainer.config import Config
from trainer.dotted import DottedPathError, resolve_dotted

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
    "learner.packing": ("shared_prompt", "padded"),
    "engine.on_failed": ("drop_rollout", "drop_group"),
    "weight_sync.mode": ("abort", "keep", "wait"),
    "weight_sync.kv_cache": ("recompute", "reuse"),
    "weight_sync.backend": ("auto", "gloo", "nccl"),
    "logger.wandb.mode": ("auto", "online", "offline", "disabled"),
}
"""The keys that take one of a few words."""

EXTENSIBLE: dict[str, tuple[str, ...]] = {
    "algorithm.advantage": ("statistics",),
    "algorithm.objective": ("batch", "proximal", "algorithm"),
    "algorithm.correction.weight": ("log_ratio", "loss_mask", "sequence"),
    "algorithm.correction.mask": ("log_ratio", "loss_mask", "sequence"),
    "algorithm.aggregation": ("loss", "batch", "denominators", "algorithm"),
}
"""The keys that may also name a function of the user's by its dotted path, and what it is called with."""

AT_LEAST: dict[str, float] = {
    "steps": 1,
    "batch.prompts": 1,
    "sampling.group_size": 1,
    "sampling.max_tokens": 1,
    "sampling.min_tokens": 0,
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
    "algorithm.filter.overlong_buffer": 0,
    "algorithm.filter.overlong_penalty": 0,
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
    "rewarding.workers": 1,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
}
"""The smallest value of a number; those that may be null are not looked at then."""

POSITIVE = (
    "algorithm.gate_positive",
    "algorithm.gate_negative",
    "optimizer.max_grad_norm",
    "learner.timeout",
    "engine.start_timeout",
    "engine.rollout_timeout",
    "sampling.repetition_penalty",
    "weight_sync.timeout",
    "weight_sync.drain_timeout",
    "rewarding.timeout",
    "shutdown.timeout",
)
"""Numbers that must be greater than 0."""


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
    # Two letters that changed places are likelier than another word that is as close.
    close = close or [option for option in options if sorted(option) == sorted(word)][:1]
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
        if key in EXTENSIBLE and "." in value:
            _check_function(key, value)
        elif value not in allowed:
            hint = nearest(str(value), allowed)
            raise ConfigError(f"`{key}={value}`: the value must be one of {', '.join(allowed)}{hint}")
    for key, least in AT_LEAST.items():
        if get(config, key) is None:
            continue
        if not least <= get(config, key) < math.inf:  # false for NaN too
            raise ConfigError(f"`{key}={get(config, key)}`: the value must be at least {least:g}, and finite")
    for key in POSITIVE:
        if not 0 < get(config, key) < math.inf:
            raise ConfigError(f"`{key}={get(config, key)}`: the value must be greater than 0, and finite")
    _check_sampling(config)
    _check_resumable(config)
    if found := combinations.problem(config.algorithm, config.sampling):
        raise ConfigError(found)
    _check_parallelism(config)


def _check_function(key: str, path: str) -> None:
    """Refuse a dotted path that names nothing callable with what the key's function is called with."""
    arguments = EXTENSIBLE[key]
    try:
        function = resolve_dotted(path, key)
        inspect.signature(function).bind(*arguments)
    except DottedPathError as error:
        raise ConfigError(str(error)) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"`{key}={path}` must name a function that can be called with ({', '.join(arguments)}): {error}"
        ) from error


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
    if penalised and not combinations.corrected(algorithm):
        # Unlike top-p, a penalty leaves every token a probability above 0, so an importance ratio is defined.
        raise ConfigError(
            f"{', '.join(penalised)}: penalties make the engine's log-probabilities incomparable with the learner's, "
            "which does not apply them; only an importance ratio against the engine makes up for that, so use "
            "`algorithm.correction.weight=token`, or leave the penalties off"
        )


def _check_parallelism(config: Config) -> None:
    rollouts = config.batch.prompts * config.sampling.group_size
    if rollouts < config.learner.ranks:
        raise ConfigError(
            f"`learner.ranks={config.learner.ranks}` needs at least as many rollouts in a batch; "
            f"`batch.prompts={config.batch.prompts}` x `sampling.group_size={config.sampling.group_size}` is {rollouts}"
        )
    if config.learner.zero_stage > 3:
        raise ConfigError(f"`learner.zero_stage={config.learner.zero_stage}`: DeepSpeed knows the stages 0 to 3")
    if config.hardware == "cpu" and config.weight_sync.backend == "nccl":
        raise ConfigError("`weight_sync.backend=nccl` needs GPUs; with `hardware=cpu` use `weight_sync.backend=gloo`")
    if config.hardware == "gpu" and config.weight_sync.backend == "gloo":
        raise ConfigError("`weight_sync.backend=gloo` is for CPU engines; with `hardware=gpu` use `nccl`")


def get(config: Any, key: str) -> Any:
    """The value at a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config
