"""Everything that can be known, and can be wrong, before an engine starts: data, model, prompts, reward functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from generator.task import Task, TaskContext, TaskData
from trainer.config import Config
from trainer.data import PromptStream, build_prompts
from trainer.dotted import resolve_dotted
from trainer.model import ResolvedModel, hub_reachable, load_tokenizer, resolve_model
from trainer.placement import device_kind, prompt_limit
from trainer.rewards import RewardPart, resolve_rewards


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run starts from."""

    data: TaskData
    model: ResolvedModel
    tokenizer: Any
    prompts: PromptStream
    rewards: tuple[RewardPart, ...]


def load_inputs(config: Config) -> Inputs:
    """Load data, model folder, tokenizer and reward functions; all of them cheap, none starts a process."""
    task: Task = resolve_dotted(config.task, "task")()
    context = TaskContext(config.data.path, config.data.options, hub_reachable, config.seed)
    data = task.load(context)
    rewards = resolve_rewards(config.reward, task.rewards())
    model = resolve_model(
        config.model.path,
        hub_id=config.model.hub_id,
        cache_dir=config.model.cache_dir,
        device_kind=device_kind(config),
        dtype=config.model.dtype,
    )
    tokenizer = load_tokenizer(model.path)
    prompts = build_prompts(data.rows, task.prompt, tokenizer, max_tokens=prompt_limit(config, model))
    stream = PromptStream(prompts, seed=config.seed, shuffle=config.data.shuffle)
    return Inputs(data, model, tokenizer, stream, rewards)
