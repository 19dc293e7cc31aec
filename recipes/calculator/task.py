"""The calculator task: the problems of the GSM8K recipe, asked with a calculator at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from generator.task import Messages, TaskContext, TaskData
from recipes.calculator.environment import CalculatorEnvironment
from recipes.gsm8k.task import GSM8K

INSTRUCTION = "Write every calculation as <calc>...</calc>; a calculator continues it. End with #### and the answer."
EXAMPLE = (
    "Sam has 2 pens. Sam gets 3 more. How many pens does Sam have now?",
    "<calc>2 + 3</calc> = 5\n#### 5",
)
"""One solved problem: a small model copies its form, where it does not follow an instruction in words."""


class Calculator:
    """Word problems with a calculator. Data and its options are those of :class:`recipes.gsm8k.task.GSM8K`."""

    def __init__(self) -> None:
        self._problems = GSM8K()

    def load(self, context: TaskContext) -> TaskData:
        """The first of: ``data.path``, GSM8K from the hub if cached or reachable, generated problems."""
        return self._problems.load(context)

    def prompt(self, row: Mapping[str, Any]) -> Messages:
        """A solved example, then the problem."""
        asked, answered = EXAMPLE
        return [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answered},
            {"role": "user", "content": str(row["question"])},
        ]

    def environment(self) -> CalculatorEnvironment:
        """The calculator, which also scores the answer."""
        return CalculatorEnvironment()

    def rewards(self) -> list[tuple[str, str, float]]:
        """None: the environment scores."""
        return []
