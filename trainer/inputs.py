"""Everything that can be known, and can be wrong, before an engine starts: data, model, prompts, reward functions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from generator.rollout import Prompt
from generator.task import Environment, Task, TaskContext, TaskData
from trainer.checks import ConfigError
from trainer.config import Config
from trainer.data import PromptStream, build_prompts
from trainer.dotted import DottedPathError, resolve_dotted
from trainer.model import ResolvedModel, hub_reachable, load_tokenizer, resolve_model
from trainer.placement import check_tensor_parallel, device_kind, prompt_limit
from trainer.rewards import RewardPart, resolve_rewards


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run starts from."""

    data: TaskData
    model: ResolvedModel
    tokenizer: Any
    prompts: PromptStream
    held_out: tuple[Prompt, ...]
    """What evaluations sample."""
    rewards: tuple[RewardPart, ...]
    environment: Environment | None = None
    """What the model acts in, instead of being scored by ``rewards``."""
    reference: ResolvedModel | None = None
    """What a KL penalty compares with, where that is not the model the run starts from."""

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that is ever sampled."""
        return max(self.prompts.longest_prompt, *(len(prompt.token_ids) for prompt in self.held_out), 0)


def load_inputs(config: Config) -> Inputs:
    """Load data, model folder, tokenizer and reward functions; all of them cheap, none starts a process."""
    task = make_task(config)
    data = task.load(
        TaskContext(config.data.path, config.data.options, hub_reachable, config.seed, config.data.eval_path)
    )
    environment = find_environment(task)
    if environment is not None and config.reward is not None:
        raise ConfigError(
            f"`reward={config.reward}`: the task {config.task} is an environment and scores its episodes itself; leave "
            "`reward` unset"
        )
    rewards = () if environment else resolve_rewards(config.reward, task.rewards())
    model = find_model(config, config.model.path)
    check_tensor_parallel(config, model)
    kl = config.algorithm.kl
    reference = find_model(config, kl.model) if kl.coefficient > 0 and kl.model else None
    tokenizer = load_tokenizer(model.path)
    longest = prompt_limit(config, model)
    prompts = build_prompts(data.rows, task.prompt, tokenizer, max_tokens=longest)
    rows = _held_out_rows(config, data)
    held_out = build_prompts(rows, task.prompt, tokenizer, max_tokens=longest) if rows else []
    stream = PromptStream(prompts, seed=config.seed, shuffle=config.data.shuffle)
    return Inputs(data, model, tokenizer, stream, tuple(held_out), rewards, environment, reference)


def _held_out_rows(config: Config, data: TaskData) -> list[Mapping[str, Any]]:
    """The rows of an evaluation. Raises :class:`ConfigError` when evaluations are asked for and there are none."""
    if not config.evaluation.every:
        return []
    if not len(data.eval_rows):
        raise ConfigError(
            f"there is nothing to evaluate on: the data holds no rows out ({data.source}); set `data.eval_path` to a "
            "file of rows that are not trained on, or train with `evaluation.every=0`"
        )
    count = min(len(data.eval_rows), config.evaluation.prompts or len(data.eval_rows))
    return [data.eval_rows[index] for index in range(count)]


def find_model(config: Config, path: str) -> ResolvedModel:
    """The model that ``path`` names, as ``model.path`` does, in a run of this configuration."""
    return resolve_model(
        path,
        hub_id=config.model.hub_id,
        cache_dir=config.model.cache_dir,
        device_kind=device_kind(config),
        dtype=config.model.dtype,
    )


def make_task(config: Config) -> Task:
    """The task that ``task`` names. Raises :class:`DottedPathError` for something that is no task."""
    factory = resolve_dotted(config.task, "task")
    try:
        task: Task = factory()
    except Exception as error:
        raise DottedPathError(f"task: {config.task} cannot be made: {type(error).__name__}: {error}") from error
    missing = [name for name in ("load", "prompt") if not callable(getattr(task, name, None))]
    if missing:
        raise DottedPathError(f"task: {config.task} makes a {type(task).__name__}, which has no method `{missing[0]}`")
    return task


def find_environment(task: Task) -> Environment | None:
    """The task's environment, or ``None`` for a task with reward functions.

    Raises :class:`DottedPathError` for something without a coroutine method ``run``.
    """
    make = getattr(task, "environment", None)
    environment: Environment | None = make() if make is not None else None
    if environment is not None and not inspect.iscoroutinefunction(getattr(environment, "run", None)):
        raise DottedPathError(
            f"task: the environment {type(environment).__name__} has no `async def run(self, task, sampler)`"
        )
    return environment
