"""Checks of a composed configuration, and the readable errors of everything that can be wrong with it.

All of it runs before anything heavy starts. A :class:`ConfigError` is one paragraph: what is wrong, where, and the
nearest valid key or value.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import Any

from generator.adapter import RANKS
from trainer import allowed, sampling_checks
from trainer.algorithm import combinations
from trainer.config import CheckpointConfig, Config
from trainer.mixture import MixtureError, data_sources
from trainer.nearest import nearest

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


def sections(schema: type = Config, prefix: str = "") -> dict[str, str]:
    """The dotted key of every group of keys, by the name of its class."""
    found: dict[str, str] = {}
    for item in dataclasses.fields(schema):
        factory: Any = item.default_factory
        if isinstance(factory, type) and dataclasses.is_dataclass(factory):
            found |= {factory.__name__: prefix + item.name, **sections(factory, f"{prefix}{item.name}.")}
    return found


def check(config: Config) -> None:
    """Raise :class:`ConfigError` for the first value or combination that cannot work."""
    for key, value in leaves(config):
        if found := allowed.problem(key, value):
            raise ConfigError(found)
    if found := sampling_checks.problem(config):
        raise ConfigError(found)
    if found := combinations.problem(config.algorithm, config.sampling, config.learner):
        raise ConfigError(found)
    _check_parallelism(config)
    _check_streaming(config)
    _check_evaluation(config)
    _check_conditions(config)
    _check_best(config)
    _check_watchdog(config)
    _check_tensorboard(config)
    try:
        data_sources(config.data)
    except MixtureError as error:
        raise ConfigError(str(error)) from error


def _check_conditions(config: Config) -> None:
    if not config.checks:
        return
    from trainer.conditions import ConditionError, read_conditions  # reads the catalogue of metrics, and with it numpy

    try:
        read_conditions(config.checks)
    except ConditionError as error:
        raise ConfigError(f"`checks`: {error}") from None


def _check_best(config: Config) -> None:
    """A metric that no step or evaluation of this run has would keep nothing, without a word."""
    metric, evaluation = config.checkpoint.best, config.evaluation
    if metric is None or metric == CheckpointConfig.best:  # the default keeps nothing in a run without evaluations
        return
    from trainer.watch import catalogue  # not at every start: it comes with the console

    if catalogue.unknown([metric]):
        names = [found.name for found in (*catalogue.EVALUATION, *catalogue.METRICS)]
        raise ConfigError(f"`checkpoint.best={metric}` is no metric{nearest(metric, names)}")
    if metric.startswith("eval/") and not evaluation.every:
        raise ConfigError(f"`checkpoint.best={metric}` needs evaluations; set `evaluation.every`")
    pass_metrics = [f"eval/pass@{2**power}" for power in range(evaluation.rollouts.bit_length())]
    if metric.startswith("eval/pass@") and metric not in pass_metrics:
        raise ConfigError(
            f"`checkpoint.best={metric}`: with `evaluation.rollouts={evaluation.rollouts}` k is 1, 2, 4, ... up to "
            f"{evaluation.rollouts}"
        )


def _check_tensorboard(config: Config) -> None:
    if config.logger.tensorboard.enabled and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "`logger.tensorboard.enabled=true` needs the package tensorboard, which is not installed; "
            "`pip install tensorboard`, or leave it off: `metrics.jsonl` and `report.html` hold the same"
        )


def _check_evaluation(config: Config) -> None:
    evaluation = config.evaluation
    if evaluation.temperature == 0 and evaluation.rollouts > 1:
        raise ConfigError(
            f"`evaluation.temperature=0` with `evaluation.rollouts={evaluation.rollouts}`: greedy decoding makes every "
            "rollout of a prompt the same; use one, or a temperature"
        )
    if evaluation.engine == "dedicated" and config.weight_sync.backend == "ipc":
        raise ConfigError(
            "`evaluation.engine=dedicated` needs a GPU of its own, and `weight_sync.backend=ipc` reaches only the "
            "learner's; use `evaluation.engine=shared`, or `weight_sync.backend=nccl`"
        )
    tokens = evaluation.max_tokens or config.sampling.max_tokens
    if config.engine.max_model_len and config.engine.max_model_len <= tokens:
        raise ConfigError(
            f"`engine.max_model_len={config.engine.max_model_len}` leaves no room for a prompt beside "
            f"`evaluation.max_tokens={tokens}`"
        )


def _check_streaming(config: Config) -> None:
    if config.batch.streaming and (reason := combinations.whole_batch_needed(config.algorithm, config.learner)):
        possible = ", ".join(combinations.PART_BY_PART)
        raise ConfigError(
            f"`batch.streaming=true` lets the learner begin before the batch is full, and {reason}; leave it off, or "
            f"use one update a batch with `algorithm.advantage` {possible} and without what looks at the whole batch"
        )


def _check_parallelism(config: Config) -> None:
    rollouts = config.batch.prompts * config.sampling.group_size
    if rollouts < config.learner.ranks:
        raise ConfigError(
            f"`learner.ranks={config.learner.ranks}` needs at least as many rollouts in a batch; "
            f"`batch.prompts={config.batch.prompts}` x `sampling.group_size={config.sampling.group_size}` is {rollouts}"
        )
    minibatches = config.learner.minibatches
    if minibatches > config.batch.prompts:
        raise ConfigError(
            f"`learner.minibatches={minibatches}` is more than `batch.prompts={config.batch.prompts}`: a minibatch is "
            "made of whole prompt groups; for more updates a batch use `learner.epochs`"
        )
    smallest = config.batch.prompts // minibatches * config.sampling.group_size
    if smallest < config.learner.ranks:
        raise ConfigError(
            f"`learner.minibatches={minibatches}` leaves {smallest} rollouts for the smallest minibatch, and "
            f"`learner.ranks={config.learner.ranks}` needs at least as many"
        )
    if config.learner.offload and config.learner.zero_stage == 0:
        raise ConfigError("`learner.offload=true` moves what ZeRO shards; use `learner.zero_stage` 1, 2 or 3 with it")
    if config.learner.offload and config.hardware == "cpu":
        raise ConfigError(
            "`learner.offload=true` with `hardware=cpu` saves nothing: the learner is in CPU memory anyway"
        )
    _check_cores(config)
    _check_backend(config)
    _check_lora(config)


def _check_cores(config: Config) -> None:
    bound, workers = config.engine.cpu_threads_bind, config.engine.tensor_parallel
    if bound != "auto" and workers > 1 and bound.count("|") + 1 != workers:
        raise ConfigError(
            f"`engine.cpu_threads_bind={bound}` names the cores of {bound.count('|') + 1} workers, and "
            f"`engine.tensor_parallel={workers}` makes {workers}; separate them by |, or leave it at auto"
        )


def _check_watchdog(config: Config) -> None:
    watchdog = config.watchdog
    if watchdog.warn_after > watchdog.fail_after:
        raise ConfigError(
            f"`watchdog.warn_after={watchdog.warn_after:g}` is more than `watchdog.fail_after="
            f"{watchdog.fail_after:g}`: the run would fail before it warns"
        )


def _check_lora(config: Config) -> None:
    lora, sync = config.learner.lora, config.weight_sync
    if lora.rank == 0 and lora.targets:
        raise ConfigError(
            "`learner.lora.targets` has no effect without adapters; set `learner.lora.rank` too, such as 16"
        )
    if sync.lora == "merged":
        return
    if lora.rank == 0:
        raise ConfigError(
            "`weight_sync.lora=adapter` pushes an adapter, and there is none; set `learner.lora.rank`, such as 16"
        )
    if not lora.targets:
        raise ConfigError(
            "`weight_sync.lora=adapter` needs `learner.lora.targets`: engines make room for adapters when they start; "
            "in most models all linear layers are [q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
        )
    if dotted := [name for name in lora.targets if "." in name]:
        raise ConfigError(
            f"`learner.lora.targets` names {', '.join(map(repr, dotted))}, and with `weight_sync.lora=adapter` engines "
            "know layers by the last part of their names alone; write "
            f"{', '.join(sorted({name.rpartition('.')[2] for name in dotted}))}, or use `weight_sync.lora=merged`"
        )
    if config.evaluation.every and config.evaluation.engine == "dedicated":
        raise ConfigError(
            "`weight_sync.lora=adapter` with `evaluation.engine=dedicated` is not supported yet; use "
            "`weight_sync.lora=merged`, or `evaluation.engine=shared`"
        )
    if lora.rank > RANKS[-1]:
        raise ConfigError(
            f"`learner.lora.rank={lora.rank}` with `weight_sync.lora=adapter`: engines take adapters up to rank "
            f"{RANKS[-1]}; use `weight_sync.lora=merged`, which knows no bound"
        )
    if sync.staging or sync.delta:
        key = "staging" if sync.staging else "delta"
        raise ConfigError(
            f"`weight_sync.{key}=true` with `weight_sync.lora=adapter`: after the first push little travels anyway, "
            f"and vLLM loads an adapter in its place at once; leave `weight_sync.{key}` off"
        )


def _check_backend(config: Config) -> None:
    backend, engine, ranks = config.weight_sync.backend, config.engine, config.learner.ranks
    if config.hardware == "cpu" and backend in ("nccl", "ipc"):
        raise ConfigError(
            f"`weight_sync.backend={backend}` needs GPUs; with `hardware=cpu` use `weight_sync.backend=gloo`"
        )
    if config.hardware in ("gpu", "cluster") and backend == "gloo":
        raise ConfigError(
            f"`weight_sync.backend=gloo` is for CPU engines; with `hardware={config.hardware}` use "
            "`weight_sync.backend=nccl`"
        )
    if config.weight_sync.staging and config.hardware in ("gpu", "cluster"):
        raise ConfigError(
            "`weight_sync.staging=true` works over `weight_sync.backend=gloo` only, so with `hardware=cpu`: vLLM's "
            "nccl engine receives into the model itself; leave `weight_sync.staging` off"
        )
    if backend == "ipc" and config.weight_sync.delta:
        raise ConfigError(
            "`weight_sync.delta=true` saves bytes on a wire, and `weight_sync.backend=ipc` has none; leave it off"
        )
    if backend == "ipc" and (engine.count, engine.tensor_parallel, ranks) != (1, 1, 1):
        raise ConfigError(
            "`weight_sync.backend=ipc` is for one engine and one learner rank that share a GPU, but "
            f"`engine.count={engine.count}`, `engine.tensor_parallel={engine.tensor_parallel}` and "
            f"`learner.ranks={ranks}`; use `weight_sync.backend=nccl`"
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
