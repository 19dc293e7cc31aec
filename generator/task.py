"""The public task interface: what a recipe implements.

A recipe package offers one factory, named in the configuration by dotted path (``task: recipes.gsm8k.GSM8K``). Nothing
else of the framework is imported by recipes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Messages = list[dict[str, str]]
"""A chat: a list of ``{"role": ..., "content": ...}``, rendered with the model's chat template."""


class DataError(ValueError):
    """The data set cannot be used. The message names the file and line, or the missing column. Exit code 2."""


class ModelError(ValueError):
    """The configured model cannot be loaded. The message names the path and the reason. Exit code 2."""


class RewardFunction(Protocol):
    """A reward function with the signature that the TRL ecosystem uses, plain or ``async``.

    ``prompts`` and ``completions`` are texts, one a rollout; every data set column arrives by name as a list of equal
    length. Returns one float a rollout, or ``None`` for a rollout it declines to score.
    """

    def __call__(
        self, prompts: list[str], completions: list[str], **columns: Any
    ) -> list[float | None] | Awaitable[list[float | None]]: ...


@dataclass(frozen=True, slots=True)
class TaskContext:
    """What a recipe is told when its data is loaded."""

    data_path: str | None
    """``data.path`` of the configuration: a local file, or ``None``."""
    options: Mapping[str, Any]
    """``data.options`` of the configuration: keys that only this recipe knows."""
    hub_reachable: Callable[[], bool]
    """Whether data sets can be fetched from, or are cached from, the model hub. Called at most once, lazily."""
    seed: int


@dataclass(frozen=True, slots=True)
class TaskData:
    """The rows of a task and where they came from.

    ``rows`` is indexable and has a length; a row is a mapping of columns. ``source`` says in one phrase what was taken
    and ``reason`` why; both are shown in the first lines of a run.
    """

    rows: Sequence[Mapping[str, Any]]
    source: str
    reason: str
    eval_rows: Sequence[Mapping[str, Any]] = field(default=())


class Task(Protocol):
    """A task: where its data comes from and how a row becomes a prompt."""

    def load(self, context: TaskContext) -> TaskData:
        """Load the data. Raises :class:`DataError` with the file and line of what is wrong."""
        ...

    def prompt(self, row: Mapping[str, Any]) -> str | Messages:
        """Turn a row into plain text, or into a chat that the model's chat template renders."""
        ...

    def rewards(self) -> list[tuple[str, str, float]]:
        """The default reward functions, as (name, dotted path, weight); ``reward`` of a run replaces them."""
        ...
