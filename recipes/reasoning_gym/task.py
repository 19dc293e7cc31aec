"""The reasoning-gym task: rows that the library generates, and the chat that a row becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from generator.task import DataError, Messages, TaskContext, TaskData
from recipes.bounded import CallCutError, CallFailedError
from recipes.options import check_options, check_whole_number
from recipes.reasoning_gym import reward

DEFAULT_TASK = "chain_sum"
OPTIONS = ("task", "config", "easy", "train_rows", "eval_rows", "prompt")
EASY = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "basic_arithmetic": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}
"""What ``data.options.easy`` configures, of these tasks: what a model of 135M parameters gets right now and then."""
GENERATE_SECONDS = 600.0
SEED_STRIDE = 1_000_003
"""Between the library's seeds of two runs: it adds the number of a row to its seed."""
INSTALL = (
    "`pip install reasoning-gym==0.1.25` (the extra `tasks` of midflight; `make setup` installs it; one part of it is "
    "built with gcc and the headers of Python)"
)


class ReasoningGym:
    """Any task of reasoning-gym.

    Options (``data.options``): ``task``, its name; ``config``, fields of its configuration; ``easy``, to begin
    with the easiest configuration, of the tasks in :data:`EASY`; ``train_rows`` and ``eval_rows``;
    ``prompt``, a system prompt of the library (default, simple, direct, chain_of_draft, DeepSeekZero), or ``examples``:
    some rows with their answers, for small models that do not follow an instruction.
    """

    def __init__(self) -> None:
        self._style = "default"
        self._system = ""
        self._examples: list[Mapping[str, Any]] = []

    def load(self, context: TaskContext) -> TaskData:
        """Generate the rows. Raises :class:`DataError` for a task, an option or a value that cannot be, and where the
        library is not installed."""
        options = _checked_options(context)
        task, config = options["task"], options["config"]
        seed = context.seed * SEED_STRIDE % 2**31
        self._style = options["prompt"]
        arguments = (task, config, seed, options["train_rows"], options["eval_rows"], self._style)
        generated = _generate(*arguments)
        self._system, self._examples = generated["system"], generated["examples"]
        if self._style == "examples" and not all(example["answer"] for example in self._examples):
            raise DataError(f"data.options.prompt is examples, and rows of {task} have no answer to show; use default")
        shape = f" ({', '.join(f'{key} {value}' for key, value in config.items())})" if config else ""
        return TaskData(
            generated["train"],
            f"{len(generated['train'])} rows of reasoning_gym's {task}{shape}",
            "data.options.task is set" if "task" in context.options else "data.options.task is not set",
            generated["eval"],
        )

    def prompt(self, row: Mapping[str, Any]) -> Messages:
        """The chat for ``row``: a system prompt of the library, or examples with their answers."""
        question = {"role": "user", "content": str(row["question"])}
        if self._style != "examples":
            return [{"role": "system", "content": self._system}, question]
        chat: Messages = [
            {"role": "system", "content": ""}
        ]  # keeps the chat template from adding a longer one of its own
        for example in self._examples:
            chat += [
                {"role": "user", "content": str(example["question"])},
                {"role": "assistant", "content": f"<answer>{example['answer']}</answer>"},
            ]
        return [*chat, question]

    def rewards(self) -> list[tuple[str, str, float]]:
        """The task's own scorer."""
        return [
            ("score", "recipes.reasoning_gym.reward.score", 1.0),
            ("answer_tags", "recipes.reasoning_gym.reward.answer_tags", 0.0),
        ]


def _generate(*arguments: Any) -> dict[str, Any]:
    try:
        generated: dict[str, Any] = reward.library("generate", *arguments, seconds=GENERATE_SECONDS)
    except CallCutError as error:
        raise DataError(f"generating the rows {error}; lower data.options.train_rows, or make them easier") from error
    except CallFailedError as error:
        wrong = f"this recipe needs the library reasoning-gym, which cannot be used: {error}"
        raise DataError(f"{wrong}; {INSTALL}") from error
    if "problem" in generated:
        raise DataError(generated["problem"])
    return generated


def _checked_options(context: TaskContext) -> dict[str, Any]:
    """``data.options`` with its defaults. Raises :class:`DataError`."""
    if context.data_path is not None or context.eval_path is not None:
        raise DataError("data.path and data.eval_path are set, but reasoning_gym generates its rows; leave them unset")
    check_options(context.options, OPTIONS, {})
    options: dict[str, Any] = {
        "task": DEFAULT_TASK,
        "config": {},
        "easy": False,
        "train_rows": 512,
        "eval_rows": 64,
        "prompt": "default",
    }
    options |= {key: value for key, value in context.options.items() if value is not None}
    for key in ("task", "prompt"):
        if not isinstance(options[key], str):
            raise DataError(f"data.options.{key} is {options[key]!r}, not a text")
    if not isinstance(options["config"], Mapping) or not all(isinstance(key, str) for key in options["config"]):
        raise DataError(f"data.options.config is {options['config']!r}, not a mapping of the task's own keys")
    if not isinstance(options["easy"], bool):
        raise DataError(f"data.options.easy is {options['easy']!r}; it must be true or false")
    if options["easy"]:
        options["config"] = {**EASY.get(options["task"], {}), **options["config"]}
    for key, least in {"train_rows": 1, "eval_rows": 0}.items():
        check_whole_number(key, options[key], least)
    return options
