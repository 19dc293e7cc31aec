"""The calculator task: the problems of the GSM8K recipe, asked with a calculator at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from generator.task import Messages, TaskContext, TaskData
from recipes.calculator.environment import CalculatorEnvironment
from recipes.gsm8k.task import GSM8K

EXAMPLES = (
    ("Sam has 2 pens. Sam gets 3 more. How many pens does Sam have now?", "<calc>2 + 3</calc> = 5\n#### 5"),
    ("Ida has 8 keys. Ida loses 5. How many keys does Ida have now?", "<calc>8 - 5</calc> = 3\n#### 3"),
    (
        "Tom has 4 cups. A week later Tom has 6 times as many. How many cups does Tom have now?",
        "<calc>4 * 6</calc> = 24\n#### 24",
    ),
)
"""Solved problems: a small model copies their form, where it does not follow an instruction in words. With one example
SmolLM2-135M wrote a call in 1 of 24 answers, with these three in 3 of 12."""


class Calculator:
    """Word problems with a calculator. Data and its options are those of :class:`recipes.gsm8k.task.GSM8K`."""

    def __init__(self) -> None:
        self._problems = GSM8K()

    def load(self, context: TaskContext) -> TaskData:
        """The first of: ``data.path``, GSM8K from the hub if cached or reachable, generated problems."""
        return self._problems.load(context)

    def prompt(self, row: Mapping[str, Any]) -> Messages:
        """Three solved examples, then the problem."""
        chat = [{"role": "system", "content": ""}]  # keeps the chat template from adding a longer one of its own
        for asked, answered in EXAMPLES:
            chat += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*chat, {"role": "user", "content": str(row["question"])}]

    def environment(self) -> CalculatorEnvironment:
        """The calculator, which also scores the answer."""
        return CalculatorEnvironment()

    def rewards(self) -> list[tuple[str, str, float]]:
        """None: the environment scores."""
        return []
