"""The GSM8K task: the rows of the first source there is, and the chat that a row becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from generator.task import DataError, Messages, TaskContext, TaskData
from recipes.gsm8k.problems import Difficulty, generate
from recipes.gsm8k.source import HUB_ID, read_file, read_hub
from recipes.hub import HubError
from recipes.options import check_options

REASONING_INSTRUCTION = (
    "Solve the problem. Reason step by step, then write the final answer on a line of its own as #### <number>."
)
EXAMPLES = {
    1: ("Sam has 2 pens. Sam gets 3 more. How many pens does Sam have now?", "2 + 3 = 5\n#### 5"),
    2: (
        "Sam has 2 pens. Sam gets 7 more. Sam loses 4. How many pens does Sam have now?",
        "2 + 7 = 9\n9 - 4 = 5\n#### 5",
    ),
}
"""One solved problem, by how many steps it shows. It stands in the prompt of the generated problems because the small
model that they are for does not follow an instruction in words, and because it keeps responses short."""

SOURCES = ("auto", "hub", "generated")
STYLES = ("auto", "reason", "short")
OPTIONS = ("source", "prompt", *(field.name for field in fields(Difficulty)))


class GSM8K:
    """Grade-school word problems.

    Options (``data.options``): ``source`` (auto, hub, generated), ``prompt`` (auto, reason, short), and the fields of
    :class:`recipes.gsm8k.problems.Difficulty` for the generated problems.
    """

    def __init__(self) -> None:
        self._style = "reason"
        self._example = EXAMPLES[1]

    def load(self, context: TaskContext) -> TaskData:
        """The first of: ``data.path``, the hub data set if cached or reachable, the embedded generator.

        Raises :class:`DataError` for a file that is not in GSM8K's schema, an unknown option, or ``source=hub`` without
        the hub.
        """
        check_options(context.options, OPTIONS, {"source": SOURCES, "prompt": STYLES})
        data = self._load(context)
        style = context.options.get("prompt", "auto")
        generated = data.source.startswith(GENERATED)
        self._example = EXAMPLES[min(Difficulty.from_options(context.options).steps, max(EXAMPLES))]
        self._style = ("short" if generated else "reason") if style == "auto" else style
        return data

    def prompt(self, row: Mapping[str, Any]) -> Messages:
        """The chat for ``row``: an instruction to reason for real problems, a short example for generated ones."""
        question = {"role": "user", "content": str(row["question"])}
        if self._style == "reason":
            return [{"role": "system", "content": REASONING_INSTRUCTION}, question]
        asked, answered = self._example
        return [
            {"role": "system", "content": ""},  # keeps the chat template from adding a longer one of its own
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answered},
            question,
        ]

    def rewards(self) -> list[tuple[str, str, float]]:
        """The weighted parts; their weights sum to 1."""
        return [
            ("exact_answer", "recipes.gsm8k.reward.exact_answer", 0.7),
            ("last_number", "recipes.gsm8k.reward.last_number", 0.3),
            ("answer_format", "recipes.gsm8k.reward.answer_format", 0.0),
        ]

    def _load(self, context: TaskContext) -> TaskData:
        if context.data_path is not None:
            rows = read_file(context.data_path)
            held_out = read_file(context.eval_path, "data.eval_path") if context.eval_path is not None else ()
            return TaskData(rows, f"{len(rows)} rows of {context.data_path}", "data.path is set", held_out)
        if context.eval_path is not None:
            raise DataError("data.eval_path is for data of one's own; set data.path too")
        source = context.options.get("source", "auto")
        if source == "generated":
            return _generated(context, "data.options.source is generated; hub takes openai/gsm8k")
        try:
            train, test, how = read_hub(context.hub_reachable)
        except HubError as error:
            if source == "hub":
                raise DataError(
                    f"the hub data set {HUB_ID} is not available: {error}; set data.path to a file"
                ) from error
            return _generated(context, f"data.path is not set, and of the hub data set {HUB_ID}: {error}")
        return TaskData(train, f"hub data set {HUB_ID} ({len(train)} rows)", f"data.path is not set, it is {how}", test)


GENERATED = "embedded generator"


def _generated(context: TaskContext, reason: str) -> TaskData:
    difficulty = Difficulty.from_options(context.options)
    train, held_out = generate(difficulty, context.seed)
    operations = ", ".join(difficulty.operations)
    shape = f"{difficulty.steps}-step problems ({operations}; numbers to {difficulty.largest_number})"
    return TaskData(train, f"{GENERATED}: {len(train)} {shape}", reason, held_out)
