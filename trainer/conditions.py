"""Conditions over what a run has written, such as ``last10("reward/mean") > 0.6``: read, and judged.

A condition compares two or more terms with ``<``, ``<=``, ``>``, ``>=``, ``==`` or ``!=``. A term is a number, a text
in quotes, a call of a statistic with the name of a metric, or a sum, difference, product or quotient of terms. Nothing
else is allowed, so that a condition out of a file can do no harm.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.nearest import nearest
from trainer.watch import catalogue

Value = float | str
Rows = Sequence[Mapping[str, Any]]


def _of_numbers(function: Callable[[list[float]], float]) -> Callable[[list[float]], float]:
    """``function``, and NaN where one value is: comparing with NaN, ``min`` and ``max`` would pass over it."""
    return lambda values: math.nan if any(math.isnan(value) for value in values) else function(values)


STATISTICS: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "first": ("value of the first step that has one", lambda values: values[0]),
    "last": ("value of the last step that has one", lambda values: values[-1]),
    "min": ("smallest value", _of_numbers(min)),
    "max": ("largest value", _of_numbers(max)),
    "mean": ("mean over the steps", statistics.fmean),
    "median": ("median over the steps", _of_numbers(statistics.median)),
    "sum": ("sum over the steps", math.fsum),
}
"""What a function of the values of all steps is called, and what it gives."""

SUMMARY = "summary"
ENDS = re.compile(r"(first|last)([1-9]\d*)")
"""``first10``, ``last10``: the mean over so many steps at one end, or over all where there are fewer."""

FUNCTIONS = (*STATISTICS, "first10", "last10", SUMMARY)

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


class ConditionError(ValueError):
    """The text is no condition. The message says what in it is wrong, and what is allowed."""


class MissingError(LookupError):
    """The run has not written what a condition asks for."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one condition; ``seen`` shows the values it was judged by, or why it could not be."""

    condition: str
    passed: bool
    seen: str


class Condition:
    """One condition, read. Raises :class:`ConditionError` for a text that is none."""

    def __init__(self, text: str) -> None:
        self.text = " ".join(text.split())
        try:
            body = ast.parse(self.text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
            raise ConditionError(f"`{self.text}` cannot be read: {getattr(error, 'msg', error)}") from None
        if not isinstance(body, ast.Compare):
            raise self._error('it compares nothing: write it as in `last10("reward/mean") > 0.6`')
        self._terms, self._comparisons = [body.left, *body.comparators], body.ops
        for comparison in self._comparisons:
            if type(comparison) not in _COMPARISONS:
                raise self._error("compare with <, <=, >, >=, == or !=")
        self._calls = [call for term in self._terms for call in self._checked(term)]

    @property
    def metrics(self) -> list[tuple[str, str]]:
        """``(function, name)`` of everything that it looks up."""
        return [(_function(call), _name(call)) for call in self._calls]

    def judge(self, rows: Rows, summary: Mapping[str, Any]) -> Verdict:
        """Judge the rows of ``metrics.jsonl`` and what ``summary.json`` says. What is missing or not finite fails."""
        try:
            values = {ast.unparse(call): self._looked_up(call, rows, summary) for call in self._calls}
            terms = [self._value(term, values) for term in self._terms]
            pairs = zip(self._comparisons, terms, terms[1:], strict=False)
            finite = not any(isinstance(value, float) and math.isnan(value) for value in values.values())
            passed = finite and all(_COMPARISONS[type(op)](left, right) for op, left, right in pairs)
        except (MissingError, TypeError, ValueError, ArithmeticError) as error:
            return Verdict(self.text, False, str(error))
        return Verdict(self.text, passed, ", ".join(_shown(value) for value in values.values()))

    def _error(self, what: str) -> ConditionError:
        return ConditionError(f"`{self.text}`: {what}")

    def _checked(self, term: ast.expr) -> Iterator[ast.Call]:
        """The calls in ``term``. Raises for whatever is not allowed in one."""
        match term:
            case ast.Constant(value=bool() | bytes() | complex() | None):
                raise self._error(f"`{ast.unparse(term)}` is neither a number nor a text")
            case ast.Constant():
                return
            case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
                yield from self._checked(operand)
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _ARITHMETIC:
                yield from self._checked(left)
                yield from self._checked(right)
            case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str())], keywords=[]):
                if name != SUMMARY and name not in STATISTICS and not ENDS.fullmatch(name):
                    known = [*STATISTICS, "first10", "last10", SUMMARY]
                    raise self._error(
                        f"no function is called `{name}`{nearest(name, known)} There are {', '.join(known)}"
                    )
                yield term
            case ast.Call(func=ast.Name(id=name)):
                raise self._error(f'`{name}` takes the name of one metric in quotes, as in `{name}("reward/mean")`')
            case _:
                raise self._error(
                    f"`{ast.unparse(term)}` is not allowed; names of metrics stand in quotes inside a call"
                )

    def _looked_up(self, call: ast.Call, rows: Rows, summary: Mapping[str, Any]) -> Value:
        function, name = _function(call), _name(call)
        if function == SUMMARY:
            if name not in summary:
                raise MissingError(f"summary.json has no `{name}`{nearest(name, summary)}")
            value = summary[name]
            return value if isinstance(value, str) else _number(value)
        values = [_number(row[name]) for row in rows if name in row]
        if not values:
            raise MissingError(f"no step has a `{name}`{nearest(name, {key for row in rows for key in row})}")
        if ends := ENDS.fullmatch(function):
            count = int(ends[2])
            return statistics.fmean(values[:count] if ends[1] == "first" else values[-count:])
        return STATISTICS[function][1](values)

    def _value(self, term: ast.expr, values: Mapping[str, Value]) -> Any:
        match term:
            case ast.Constant(value=value):
                return value
            case ast.UnaryOp(op=sign, operand=operand):
                value = self._value(operand, values)
                return -value if isinstance(sign, ast.USub) else value
            case ast.BinOp(left=left, op=sign, right=right):
                return _ARITHMETIC[type(sign)](self._value(left, values), self._value(right, values))
            case _:
                return values[ast.unparse(term)]


def read_conditions(texts: list[str]) -> list[Condition]:
    """Conditions that can be judged: each can be read, and asks for metrics that exist."""
    conditions = [Condition(text) for text in texts]
    for condition in conditions:
        for function, name in condition.metrics:
            if function != SUMMARY and catalogue.find(name) is None:
                meant = nearest(name, [metric.name for metric in catalogue.METRICS])
                raise ConditionError(f"`{condition.text}`: no metric is called `{name}`{meant}")
    return conditions


def _function(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Name)
    return call.func.id


def _name(call: ast.Call) -> str:
    (argument,) = call.args
    assert isinstance(argument, ast.Constant)
    return str(argument.value)


def _number(value: Any) -> float:
    """A run folder writes ``null`` for a number that was not finite."""
    return math.nan if value is None else float(value)


def _shown(value: Value) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
