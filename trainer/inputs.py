"""Everything that can be known, and can be wrong, before an engine starts: data, model, prompts, reward functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from generator.rollout import Prompt
from generator.stops import load_decode
from generator.task import DataError, Environment, ModelError, Task, TaskContext, TaskData
from trainer.checks import ConfigError
from trainer.config import Config
from trainer.data import PromptStream, build_prompts
from trainer.memory import check_memory
from trainer.mixture import DataSource, data_sources, interleaved
from trainer.model import ResolvedModel, hub_reachable, load_tokenizer, resolve_model
from trainer.placement import check_stop_tokens, check_tensor_parallel, device_kind, prompt_limit
from trainer.raised import raised
from trainer.rewards import RewardPart
from trainer.task_calls import check_rewards, find_environment, find_rewards, load_data, make_task


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


def load_inputs(config: Config, found: Callable[[], None] = lambda: None) -> Inputs:
    """Load data, model folder, tokenizer and reward functions; all of them cheap, none starts a process.

    ``found`` is called once everything is there and only the prompts, which take the time, are left to be made.
    """
    loaded = _load_sources(config)
    task = loaded[0].task
    environment = find_environment(task)
    if environment is not None and config.reward is not None:
        raise ConfigError(
            f"`reward={config.reward}`: the task {config.task} is an environment and scores its episodes itself; leave "
            "`reward` unset"
        )
    rewards = () if environment else find_rewards(config, task)
    model = find_model(config, config.model.path)
    check_tensor_parallel(config, model)
    check_stops(config, model)
    check_learnable(config, model)
    check_adapter_targets(config, model)
    reference = find_reference(config, model)
    found()
    tokenizer = load_tokenizer(model.path)
    longest = prompt_limit(config, model)
    prompts: list[Prompt] = []
    for source in loaded:
        prompts += source.prompts(source.data.rows, tokenizer, longest, len(prompts))
    shares = {source.of.name: source.of.share for source in loaded} if config.data.mixture else None
    stream = PromptStream(prompts, seed=config.seed, shuffle=config.data.shuffle, shares=shares)
    held_out = _held_out(config, loaded, tokenizer, longest)
    check_rewards(rewards, [*prompts, *held_out])
    inputs = Inputs(_described(loaded), model, tokenizer, stream, held_out, rewards, environment, reference)
    check_memory(config, model, inputs.longest_prompt)
    return inputs


@dataclass(frozen=True, slots=True)
class _LoadedSource:
    """A data set that was loaded, by a task of its own: how a row becomes a prompt may depend on the options."""

    of: DataSource
    task: Task
    data: TaskData

    def prompts(
        self, rows: Sequence[Mapping[str, Any]], tokenizer: Any, longest: int, first_id: int = 0
    ) -> list[Prompt]:
        """``rows`` of this data set as prompts."""
        with _named(self.of):
            return build_prompts(
                rows, self.task.prompt, tokenizer, max_tokens=longest, source=self.of.name, first_id=first_id
            )


def _load_sources(config: Config) -> list[_LoadedSource]:
    loaded = []
    for source in data_sources(config.data):
        task = make_task(config)
        context = TaskContext(source.path, source.options, hub_reachable, config.seed, source.eval_path)
        with _named(source):
            loaded.append(_LoadedSource(source, task, load_data(task, context)))
    return loaded


@contextlib.contextmanager
def _named(source: DataSource) -> Iterator[None]:
    """An error of the data says which of several data sets it is about."""
    try:
        yield
    except DataError as error:
        if not source.name:
            raise
        raise DataError(f"data set {source.name!r} of data.mixture: {error}") from error


def _described(loaded: Sequence[_LoadedSource]) -> TaskData:
    """What the first lines of a run say of the data."""
    if not loaded[0].of.name:
        return loaded[0].data
    texts = [f"{100 * source.of.share:.4g} % {source.of.name} ({source.data.source})" for source in loaded]
    return TaskData((), "; ".join(texts), "data.mixture is set")


def _held_out(config: Config, loaded: Sequence[_LoadedSource], tokenizer: Any, longest: int) -> tuple[Prompt, ...]:
    """The prompts of an evaluation, of several data sets in turn. Raises :class:`ConfigError` when evaluations are
    asked for and there are none."""
    evaluation = config.evaluation
    if not evaluation.every:
        return ()
    if not any(len(source.data.eval_rows) for source in loaded):
        raise ConfigError(
            f"there is nothing to evaluate on: the data holds no rows out ({_described(loaded).source}); set "
            "`data.eval_path` to a file of rows that are not trained on, or train with `evaluation.every=0`"
        )
    rows_of = [(source, _first(source.data.eval_rows, evaluation.prompts)) for source in loaded]
    chosen = interleaved([[(source, row) for row in rows] for source, rows in rows_of])
    chosen = chosen[: evaluation.prompts or len(chosen)]
    held_out: list[Prompt] = []
    for source in loaded:
        if rows := [row for other, row in chosen if other is source]:
            held_out += source.prompts(rows, tokenizer, longest, len(held_out))
    return tuple(held_out)


def find_model(config: Config, path: str) -> ResolvedModel:
    """The model that ``path`` names, as ``model.path`` does, in a run of this configuration."""
    return resolve_model(
        path,
        hub_id=config.model.hub_id,
        cache_dir=config.model.cache_dir,
        device_kind=device_kind(config),
        dtype=config.model.dtype,
    )


def find_reference(config: Config, model: ResolvedModel) -> ResolvedModel | None:
    """The model of ``algorithm.kl.model``, where the penalty is asked for and is not towards ``model`` itself.

    Raises :class:`ModelError`, also for one that knows other tokens.
    """
    kl = config.algorithm.kl
    if kl.coefficient == 0 or kl.model is None:
        return None
    try:
        reference = find_model(config, kl.model)
    except ModelError as error:
        raise ModelError(f"algorithm.kl.model, read as model.path is: {error}") from error
    if reference.vocabulary and model.vocabulary and reference.vocabulary != model.vocabulary:
        raise ModelError(
            f"algorithm.kl.model={kl.model} knows {reference.vocabulary} tokens and the model that is trained "
            f"{model.vocabulary}: a penalty compares what both say of the same tokens"
        )
    return reference


def check_stops(config: Config, model: ResolvedModel) -> None:
    """Raise :class:`ConfigError` for a stop token or a stop string that no response of the model can hold."""
    check_stop_tokens(config, model)
    if config.sampling.stop:
        try:
            load_decode(model.path, config.sampling.stop)
        except Exception as error:  # `tokenizers` raises plain Exception for a file that it cannot read
            raise ConfigError(f"`sampling.stop`: {error}") from error


def check_learnable(config: Config, model: ResolvedModel) -> None:
    """Raise :class:`ModelError` for a model that the learner would refuse when it is there, and engines are."""
    if model.scaled_logits and config.learner.ranks:
        raise ModelError(
            f"{model.source} has {model.scaled_logits}: its logits are not a plain linear layer over the hidden "
            "states, which the learner does not support"
        )


def check_adapter_targets(config: Config, model: ResolvedModel) -> None:
    """Raise :class:`ConfigError` where ``learner.lora.targets`` names what is no layer of the model."""
    lora = config.learner.lora
    if not lora.rank or not lora.targets:
        return
    from trainer.learner_setup import architecture  # both import torch, and that transformers
    from trainer.lora import target_layers

    try:
        built = architecture(model.path, config.model.trust_remote_code)
    except Exception as error:  # whatever transformers, or code that came with the model, raises
        raise ModelError(f"transformers cannot build the model in {model.path}: {raised(error)}") from error
    try:
        target_layers(built, lora.targets)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _first(rows: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """The first ``count`` rows, all of them for 0; a large data set is not read for them."""
    return [rows[index] for index in range(min(len(rows), count or len(rows)))]
