"""What math-verify says of an answer. Imports math-verify and sympy, and runs in a process of its own.

math-verify bounds its time with ``signal.alarm``: that works in a main thread only, and an alarm does not interrupt a
power of huge integers, which is one instruction of the interpreter. So its own timeouts are off here, and
:mod:`recipes.bounded` bounds the process.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from math_verify import parse, verify

_NUMBER = re.compile(
    r"""(?:[a-zA-Z]\s*=\s*)?                       # x =
        [-+]?\s*
        (?: \d+(?:\.\d+)? | \.\d+                    # 12, 0.5, .5
          | \d+\s*/\s*\d+                            # 1/2
          | \\[dt]?frac\s*\{\s*-?\d+\s*\}\s*\{\s*-?\d+\s*\} )""",
    re.VERBOSE,
)


def judge(reference: str, completion: str) -> dict[str, bool]:
    """Compare the answer that math-verify finds in ``completion`` with ``reference``, both in LaTeX.

    ``equal``: there is one, and the two are equal. ``number``: it is a number, with nothing left to compute, as ``5/6``
    is and ``1/2 + 1/3`` is not. Raises ``ValueError`` for a reference in which math-verify finds no mathematics.
    """
    wanted = _reference(reference)
    found = parse(completion, parsing_timeout=None)
    # Last in what `parse` returns is the text of the answer.
    is_number = bool(found) and isinstance(found[-1], str) and _NUMBER.fullmatch(found[-1].strip()) is not None
    return {"equal": bool(verify(wanted, found, timeout_seconds=None)), "number": is_number}


@functools.lru_cache(maxsize=256)
def _reference(text: str) -> list[Any]:
    bare = not any(mark in text for mark in ("$", r"\(", r"\["))
    wanted = parse(f"${text}$" if bare else text, parsing_timeout=None)
    if not wanted:
        raise ValueError(f"math-verify finds no mathematics in the reference answer {text!r:.100}")
    return list(wanted)


for _text in (r"\frac{1}{2}", "x^2 + 3x", r"$0.5$ and \boxed{\sqrt{2}}", "(1, 2]", "12"):
    # What its parser learns of LaTeX it learns once here, not again after every call that was cut.
    judge(r"\frac{1}{2}", _text)
