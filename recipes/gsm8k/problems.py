"""An embedded, seeded generator of word problems in GSM8K's schema, for machines that reach no data set.

A problem is a chain of events that change a count: a start ("Mia has 4 shells."), one event a step ("Mia finds 3 more
shells.") and the question for the final count. The worked answer has one line a step with GSM8K's calculator marks
and ends in ``#### <number>``. Held-out rows differ from training rows not only in wording: no combination of numbers
and operations occurs in both.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from generator.task import DataError
from recipes.generated import Sample, distinct_rows
from recipes.options import check_whole_number, several

OPERATIONS = ("add", "subtract", "multiply", "divide")
SYMBOLS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}

NAMES = (
    *("Ava", "Ben", "Carla", "David", "Emma", "Finn", "Grace", "Hugo", "Iris", "Jack", "Kate", "Leo"),
    *("Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Uma", "Victor", "Wendy", "Yara", "Zoe"),
)
ITEMS = (
    *("apples", "books", "coins", "cards", "pencils", "shells", "stamps", "marbles", "cookies", "flowers", "stickers"),
    *("oranges", "beads", "balloons", "toys", "buttons", "eggs", "pears", "rocks", "cups", "tickets", "keys"),
)
STARTS = ("{name} has {n} {items}.", "{name} starts with {n} {items}.")
EVENTS = {
    "add": ("{name} gets {n} more.", "{name} buys {n} more.", "{name} finds {n} more.", "{name} wins {n} more."),
    "subtract": ("{name} gives away {n}.", "{name} loses {n}.", "{name} sells {n}.", "{name} uses {n}."),
    "multiply": ("{name} trades them for {n} times as many.", "A week later {name} has {n} times as many."),
    "divide": ("{name} makes {n} equal piles and keeps one.", "{name} fills {n} equal bags and keeps one."),
}
QUESTIONS = ("How many {items} does {name} have now?",)

HELD_OUT_SHARE = 8
"""One combination of numbers and operations in this many is held out for evaluation."""


@dataclass(frozen=True, slots=True)
class Difficulty:
    """What the generated problems look like. Every field is a key of ``data.options``."""

    steps: int = 1
    """Events in a problem, so operations in its answer."""
    largest_number: int = 9
    """No number in a question is larger."""
    largest_result: int = 0
    """No intermediate or final result is larger; 0: no bound."""
    operations: tuple[str, ...] = ("add", "subtract", "multiply")
    """What events may do: add, subtract, multiply, divide."""
    train_rows: int = 512
    eval_rows: int = 64

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Difficulty:
        """Read ``data.options``. Raises :class:`DataError` that names a wrong key or value and what is allowed."""
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in options.items() if key in known}
        if "operations" in values:
            values["operations"] = several(values["operations"])
        difficulty = replace(cls(), **values)
        difficulty._check()
        return difficulty

    def _check(self) -> None:
        least_of = {"steps": 1, "largest_number": 2, "largest_result": 0, "train_rows": 1, "eval_rows": 0}
        most_of = {"steps": 100, "largest_number": 1000}  # each step of each problem looks at every number there is
        for name, least in least_of.items():
            check_whole_number(name, getattr(self, name), least, most_of.get(name))
        unknown = [name for name in self.operations if name not in OPERATIONS]
        if unknown or not self.operations:
            raise DataError(f"data.options.operations is {list(self.operations)}; choose from {', '.join(OPERATIONS)}")


Step = tuple[str, int]
"""An operation and its operand."""


def generate(difficulty: Difficulty, seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Generate distinct training and held-out rows with the columns ``question`` and ``answer``.

    The same difficulty and seed give the same rows on every machine. Raises :class:`DataError` when the difficulty
    allows too few distinct problems.
    """
    rng = random.Random(f"gsm8k problems {seed}")

    def sample() -> Sample | None:
        start, steps = _sample_chain(difficulty, rng)
        if steps is None:
            return None
        row = _render(start, steps, rng)
        return _split_of(start, steps), row["question"], row

    return distinct_rows(sample, difficulty, "raise data.options.largest_number or steps, add operations")


def _sample_chain(difficulty: Difficulty, rng: random.Random) -> tuple[int, list[Step] | None]:
    """Sample a start and its steps; the steps are ``None`` where no operand keeps the count in bounds."""
    start = count = rng.randint(2, difficulty.largest_number)
    steps: list[Step] = []
    for _ in range(difficulty.steps):
        operation = rng.choice(difficulty.operations)
        operands = [n for n in range(1, difficulty.largest_number + 1) if _allowed(operation, count, n, difficulty)]
        if not operands:
            return start, None
        operand = rng.choice(operands)
        steps.append((operation, operand))
        count = _apply(operation, count, operand)
    return start, steps


def _allowed(operation: str, count: int, operand: int, difficulty: Difficulty) -> bool:
    if operation == "subtract" and operand >= count:
        return False
    if operation in ("multiply", "divide") and operand < 2:
        return False
    if operation == "divide" and count % operand:
        return False
    return not difficulty.largest_result or _apply(operation, count, operand) <= difficulty.largest_result


def _apply(operation: str, count: int, operand: int) -> int:
    match operation:
        case "add":
            return count + operand
        case "subtract":
            return count - operand
        case "multiply":
            return count * operand
        case _:
            return count // operand


def _split_of(start: int, steps: list[Step]) -> str:
    """The split that owns this combination of numbers, by a hash that is the same on every machine."""
    digest = hashlib.sha256(repr((start, steps)).encode()).digest()
    return "eval" if digest[0] % HELD_OUT_SHARE == 0 else "train"


def _render(start: int, steps: list[Step], rng: random.Random) -> dict[str, str]:
    words = {"name": rng.choice(NAMES), "items": rng.choice(ITEMS)}
    sentences = [rng.choice(STARTS).format(n=start, **words)]
    lines = []
    count = start
    for operation, operand in steps:
        sentences.append(rng.choice(EVENTS[operation]).format(n=operand, **words))
        result = _apply(operation, count, operand)
        sum_text = f"{count}{SYMBOLS[operation]}{operand}"
        lines.append(f"{words['name']} has {sum_text} = <<{sum_text}={result}>>{result} {words['items']}.")
        count = result
    sentences.append(rng.choice(QUESTIONS).format(**words))
    return {"question": " ".join(sentences), "answer": "\n".join([*lines, f"#### {count}"])}
