"""Calls of a task before a run: what it returns is looked at, and what it raises becomes a message with its line.

A task is code of whoever runs it. Here a mistake in it is answered as one in the configuration is, before anything
starts; what happens in episodes and reward functions later is counted instead (:mod:`trainer.unscored`).
"""

from __future__ import annotations

import inspect
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from generator.rollout import Prompt
from generator.task import DataError, Environment, ModelError, Task, TaskContext, TaskData
from trainer.config import Config
from trainer.dotted import DottedPathError, resolve_dotted
from trainer.raised import raised
from trainer.rewards import RewardPart, check_arguments, resolve_rewards
from trainer.wording import shown

Result = TypeVar("Result")


def make_task(config: Config) -> Task:
    """The task that ``task`` names. Raises :class:`DottedPathError` for something that is no task."""
    factory = resolve_dotted(config.task, "task")
    task: Task = _called(factory, f"task: {config.task} cannot be made")
    missing = [name for name in ("load", "prompt") if not callable(getattr(task, name, None))]
    if missing:
        raise DottedPathError(f"task: {config.task} makes a {type(task).__name__}, which has no method `{missing[0]}`")
    return task


def load_data(task: Task, context: TaskContext) -> TaskData:
    """What the task loads. Raises :class:`DataError` for data that is none, and :class:`DottedPathError` where the
    task itself fails."""
    named = {"data.path": context.data_path, "data.eval_path": context.eval_path}
    paths = {key: path for key, path in named.items() if path is not None}
    for key, path in paths.items():
        check_file(key, path)
    name = type(task).__name__
    try:
        data = _called(lambda: task.load(context), f"task: `{name}.load` failed")
    except DottedPathError as error:
        if isinstance(missing := error.__cause__, FileNotFoundError):
            for key, path in paths.items():
                if str(missing.filename) == path:
                    raise DataError(f"{key}: there is no file {path} (looked in {Path.cwd()})") from error
        raise
    if not isinstance(data, TaskData):
        raise DottedPathError(f"task: `{name}.load` returned {shown(data)}, and not a generator.task.TaskData")
    for which, rows in (("rows", data.rows), ("eval_rows", data.eval_rows)):
        if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__") or isinstance(rows, Mapping | str | bytes):
            raise DottedPathError(f"task: `{name}.load` returned {which} without a length or an order: {shown(rows)}")
    return data


def check_file(key: str, path: str) -> None:
    """Raise :class:`DataError` where ``path`` is what no task can read: a device or a pipe, which a run that continues
    could not read again, a home of nobody. What does not exist may be a name that the task knows."""
    try:
        found = Path(path).expanduser()
        mode = found.stat().st_mode
    except FileNotFoundError:
        return
    except (OSError, RuntimeError) as error:
        what = getattr(error, "strerror", None) or error
        raise DataError(f"{key}: {path if len(path) <= 300 else path[:300] + '...'} cannot be read: {what}") from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise DataError(f"{key}: {path} is neither a file nor a folder; write what comes out of it into a file")


def find_environment(task: Task) -> Environment | None:
    """The task's environment, or ``None`` for a task with reward functions.

    Raises :class:`DottedPathError` for something without a coroutine method ``run``.
    """
    make = getattr(task, "environment", None)
    if make is None:
        return None
    environment: Environment | None = _called(make, f"task: `{type(task).__name__}.environment` failed")
    if environment is not None and not inspect.iscoroutinefunction(getattr(environment, "run", None)):
        raise DottedPathError(
            f"task: the environment {type(environment).__name__} has no `async def run(self, task, sampler)`"
        )
    return environment


def find_rewards(config: Config, task: Task) -> tuple[RewardPart, ...]:
    """The reward functions of ``reward``, or the task's own. Raises :class:`DottedPathError`."""
    if config.reward is not None:
        return resolve_rewards(config.reward, ())
    name = type(task).__name__
    own = _called(lambda: list(task.rewards()), f"task: `{name}.rewards` failed")
    for item in own:
        if not isinstance(item, Sequence) or [type(part) for part in item][:2] != [str, str] or len(item) != 3:
            raise DottedPathError(
                f"task: `{name}.rewards` has {shown(item)}, and not a triple of a name, a dotted path and a weight"
            )
    return resolve_rewards(None, own)


def check_rewards(parts: Sequence[RewardPart], prompts: Sequence[Prompt]) -> None:
    """Raise :class:`DottedPathError` for a function that cannot be called with the columns of some prompt."""
    check_arguments(parts, (tuple(prompt.columns) for prompt in prompts))


def _called(function: Callable[[], Result], failed: str) -> Result:
    """What ``function`` returns; an exception that is not meant for people becomes a :class:`DottedPathError`."""
    try:
        return function()
    except (DataError, ModelError, DottedPathError):
        raise
    except Exception as error:
        raise DottedPathError(f"{failed}: {raised(error)}") from error


def prompt_of(render: Callable[[Mapping[str, Any]], Any], row: Any, number: int) -> Any:
    """What ``render`` makes of the row ``number``: text, or a chat.

    Raises :class:`DataError` with the row for one that is no mapping of columns, for an exception, and for anything
    that is neither.
    """
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
        raise DataError(f"row {number} of the data set is no mapping of columns by their names: {shown(row)}")
    try:
        prompt = render(row)
    except (DataError, ModelError):
        raise
    except Exception as error:
        columns = ", ".join(row) or "none"
        raise DataError(
            f"row {number}: no prompt can be made of it: {raised(error)}; its columns: {columns}"
        ) from error
    if not isinstance(prompt, str) and not _is_chat(prompt):
        raise DataError(
            f"row {number}: the task's `prompt` returned {shown(prompt)}; a prompt is a text, or a chat: a list of "
            "{'role': ..., 'content': ...}"
        )
    return prompt


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and len(prompt) > 0
        and all(isinstance(turn, Mapping) and isinstance(turn.get("role"), str) for turn in prompt)
    )
