"""What the calculator computes: numbers, brackets and the four operations, exactly, and nothing else."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

LONGEST = 64
"""Characters of an expression; also what bounds the depth and the size of everything inside it."""
DECIMALS = 6
SPELLINGS = {"\N{MULTIPLICATION SIGN}": "*", "x": "*", "X": "*", "\N{DIVISION SIGN}": "/", "\N{MINUS SIGN}": "-"}

BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class ArithmeticSyntaxError(ValueError):
    """Not an expression of numbers and + - * /. The message is for the model to read, so it is short."""


def calculate(expression: str) -> str:
    """The value of ``expression`` as text: a whole number, or a decimal rounded to six places.

    Raises :class:`ArithmeticSyntaxError` for anything but numbers, brackets and the four operations, for a division by
    zero, and for more than 64 characters. Never evaluates code: the syntax tree is walked.
    """
    text = "".join(SPELLINGS.get(character, character) for character in expression.strip())
    if len(text) > LONGEST:
        raise ArithmeticSyntaxError("too long")
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except ZeroDivisionError as error:
        raise ArithmeticSyntaxError("division by zero") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ArithmeticSyntaxError("not arithmetic") from error
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.{DECIMALS}f}".rstrip("0").rstrip(".")


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return BINARY[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in UNARY:
            return UNARY[type(sign)](_value(operand))
    raise ArithmeticSyntaxError("not arithmetic")
