"""Rewards for answers that end in ``#### <number>``. Each compares with the reference by value, not by spelling."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

MARK = "####"

_UNSIGNED = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
# A minus is a sign only where no letter, digit or bracket stands before it: "5-3" ends in 3, "x = -3" in -3.
_NUMBER = re.compile(rf"(?P<minus>(?<![\w)])-\$?|\$-)?(?P<digits>{_UNSIGNED})")
_ANSWER = re.compile(rf"\s*(?P<minus>-\s*\$?|\$\s*-)?[+$]?\s*(?P<digits>{_UNSIGNED})(?P<rest>[^\n]*)")


def exact_answer(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 where the number after the last ``####`` is the reference's, else 0."""
    return [float(_same(marked_number(text), ref)) for text, ref in zip(completions, answer, strict=True)]


def last_number(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 where the last number in the completion, marked or not, is the reference's, else 0."""
    return [float(_same(final_number(text), ref)) for text, ref in zip(completions, answer, strict=True)]


def answer_format(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """1 where the completion has one ``####``, a number after it, and nothing after that, right or wrong; else 0."""
    return [float(_is_well_formed(text)) for text in completions]


def marked_number(text: str) -> Decimal | None:
    """The number directly after the last ``####``, or ``None`` without one.

    A dollar sign, thousands commas, a full stop and a unit are allowed; a second number on the line
    ("#### 2 + 3 = 5") makes it no answer, so that listing candidates does not pay.
    """
    _, mark, tail = _plain_minus(text).rpartition(MARK)
    found = _ANSWER.match(tail) if mark else None
    if found is None or re.search("[0-9]", found["rest"]):
        return None
    return _decimal(found)


def final_number(text: str) -> Decimal | None:
    """The last number in ``text``, or ``None`` when there is none."""
    found = list(_NUMBER.finditer(_plain_minus(text)))
    return _decimal(found[-1]) if found else None


def _same(number: Decimal | None, reference: str) -> bool:
    return number is not None and number == marked_number(reference)


def _is_well_formed(text: str) -> bool:
    if text.count(MARK) != 1 or marked_number(text) is None:
        return False
    found = _ANSWER.match(_plain_minus(text).partition(MARK)[2])
    return found is not None and found["rest"].strip() in ("", ".") and not found.string[found.end() :].strip()


def _decimal(found: re.Match[str]) -> Decimal:
    value = Decimal(found["digits"].replace(",", ""))
    return -value if found["minus"] else value


def _plain_minus(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")
