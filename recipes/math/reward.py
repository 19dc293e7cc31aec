"""Rewards for mathematics: math-verify compares the answer in a completion with the reference by what they mean."""

from __future__ import annotations

import re
from typing import Any

from recipes.bounded import BoundedCalls, CallCutError

BOX = re.compile(r"\\boxed\s*\{")

library = BoundedCalls("recipes.math.judge")


def math_verify(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
    r"""1 where math-verify finds the reference's equal in the completion, as ``0.5`` is of ``\frac{1}{2}``; else 0.

    ``None`` where judging took more time or memory than it may (see :mod:`recipes.bounded`). Raises
    :class:`recipes.bounded.CallFailedError` for a reference that math-verify cannot read.
    """
    return [_judged(text, reference, ("equal",)) for text, reference in zip(completions, answer, strict=True)]


def math_verify_number(
    prompts: list[str], completions: list[str], answer: list[str], **columns: Any
) -> list[float | None]:
    r"""As :func:`math_verify`, for answers that must be a number with nothing left to compute.

    Where the problem is a computation, what is to be computed equals the answer: ``\frac{1}{2} + \frac{1}{3}`` does
    equal ``\frac{5}{6}``. Here it earns nothing.
    """
    return [_judged(text, reference, ("equal", "number")) for text, reference in zip(completions, answer, strict=True)]


def boxed(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    r"""1 where the completion has exactly one ``\boxed{...}``, right or wrong; else 0."""
    return [float(len(BOX.findall(text)) == 1) for text in completions]


def _judged(completion: str, reference: str, needed: tuple[str, ...]) -> float | None:
    try:
        judgement = library("judge", reference, completion)
    except CallCutError:
        return None
    return float(all(judgement[name] for name in needed))
