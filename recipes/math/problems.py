"""Seeded generated problems with LaTeX answers, for machines that reach no data set.

Every answer is a number, written in LaTeX: a whole number or a fraction in lowest terms. Held-out rows differ from
training rows not only in wording: no combination of numbers occurs in both.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

from generator.task import DataError
from recipes.generated import Sample, distinct_rows
from recipes.options import check_whole_number, several

HELD_OUT_SHARE = 8
"""One combination of numbers in this many is held out for evaluation."""


@dataclass(frozen=True, slots=True)
class Difficulty:
    """What the generated problems look like. Every field is a key of ``data.options``."""

    kinds: tuple[str, ...] = ("shift", "linear", "fractions", "polynomial")
    """shift: x + a = b. linear: a x + b = c. fractions: a sum or difference. polynomial: its value at a number."""
    largest_number: int = 12
    """No number in a problem is larger, but for the right-hand sides of equations."""
    train_rows: int = 512
    eval_rows: int = 64

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Difficulty:
        """Read ``data.options``. Raises :class:`DataError` that names a wrong key or value and what is allowed."""
        known = {field.name for field in fields(cls)}
        values = {key: value for key, value in options.items() if key in known}
        if "kinds" in values:
            values["kinds"] = several(values["kinds"])
        difficulty = replace(cls(), **values)
        difficulty._check()
        return difficulty

    def _check(self) -> None:
        for name, least in {"largest_number": 2, "train_rows": 1, "eval_rows": 0}.items():
            check_whole_number(name, getattr(self, name), least)
        if not self.kinds or any(kind not in KINDS for kind in self.kinds):
            raise DataError(f"data.options.kinds is {list(self.kinds)}; choose from {', '.join(KINDS)}")


def generate(difficulty: Difficulty, seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Distinct training and held-out rows with the columns ``problem``, ``answer`` (LaTeX) and ``kind``.

    The same difficulty and seed give the same rows on every machine. Raises :class:`DataError` when the difficulty
    allows too few distinct problems.
    """
    rng = random.Random(f"math problems {seed}")

    def sample() -> Sample:
        kind = rng.choice(difficulty.kinds)
        problem, answer = KINDS[kind](rng, difficulty.largest_number)
        return _split_of(problem), problem, {"problem": problem, "answer": latex(answer), "kind": kind}

    return distinct_rows(sample, difficulty, "raise data.options.largest_number, add kinds")


def latex(number: Fraction) -> str:
    r"""``number`` in LaTeX: ``-3``, ``\frac{1}{2}``, ``-\frac{1}{2}``."""
    if number.denominator == 1:
        return str(number.numerator)
    sign = "-" if number < 0 else ""
    return rf"{sign}\frac{{{abs(number.numerator)}}}{{{number.denominator}}}"


def _shift(rng: random.Random, largest: int) -> tuple[str, Fraction]:
    solution, shift = rng.randint(1, largest), rng.randint(1, largest)
    if rng.random() < 0.5:
        return f"Solve for $x$: $x + {shift} = {solution + shift}$.", Fraction(solution)
    return f"Solve for $x$: $x - {shift} = {solution - shift}$.", Fraction(solution)


def _linear(rng: random.Random, largest: int) -> tuple[str, Fraction]:
    factor, shift, right = rng.randint(2, largest), rng.randint(1, largest), rng.randint(0, largest * 2)
    sign = rng.choice("+-")
    solution = Fraction(right - shift if sign == "+" else right + shift, factor)
    return f"Solve for $x$: ${factor}x {sign} {shift} = {right}$.", solution


def _fractions(rng: random.Random, largest: int) -> tuple[str, Fraction]:
    terms = []
    for _ in range(2):
        below = rng.randint(2, largest)
        terms.append(Fraction(rng.randint(1, below - 1), below))
    sign = rng.choice("+-")
    result = terms[0] + terms[1] if sign == "+" else terms[0] - terms[1]
    return f"Compute ${latex(terms[0])} {sign} {latex(terms[1])}$.", result


def _polynomial(rng: random.Random, largest: int) -> tuple[str, Fraction]:
    at, square, linear, constant = (rng.randint(2, largest) for _ in range(4))
    sign = rng.choice("+-")
    value = square * at**2 + (linear * at if sign == "+" else -linear * at) + constant
    return f"What is ${square}x^2 {sign} {linear}x + {constant}$ at $x = {at}$?", Fraction(value)


KINDS: dict[str, Callable[[random.Random, int], tuple[str, Fraction]]] = {
    "shift": _shift,
    "linear": _linear,
    "fractions": _fractions,
    "polynomial": _polynomial,
}


def _split_of(problem: str) -> str:
    """The split that owns this problem, by a hash that is the same on every machine."""
    return "eval" if hashlib.sha256(problem.encode()).digest()[0] % HELD_OUT_SHARE == 0 else "train"
