"""The reward of a reasoning-gym task: its own scorer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from recipes.bounded import BoundedCalls, CallCutError, CallFailedError

TAGS = re.compile(r"<answer>.*?</answer>", re.DOTALL)

library = BoundedCalls("recipes.reasoning_gym.library", memory_mib=2048)
"""Generates rows too: what it has imported and generated once it need not again."""


def score(
    prompts: list[str], completions: list[str], question: list[str], origin: list[Mapping[str, Any]], **columns: Any
) -> list[float | None]:
    """What the task's scorer says of the answer between the last ``<answer>`` and ``</answer>``, usually from 0 to 1.

    ``None`` where scoring took more time or memory than it may (see :mod:`recipes.bounded`), and where the scorer
    raised. Raises :class:`recipes.bounded.CallFailedError` when it raised for every completion.
    """
    values: list[float | None] = []
    failure: CallFailedError | None = None
    for text, asked, of in zip(completions, question, origin, strict=True):
        try:
            values.append(library("score", of, asked, text))
        except CallCutError:
            values.append(None)
        except CallFailedError as error:
            values.append(None)
            failure = error
    if failure is not None and all(value is None for value in values):
        raise failure
    return values


def answer_tags(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """1 where the completion has exactly one ``<answer>...</answer>``, right or wrong; else 0."""
    return [float(len(TAGS.findall(text)) == 1) for text in completions]
