"""The reward of the tiny task."""

from __future__ import annotations

from typing import Any

LETTER = "a"


def share_of_a(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """The share of each completion's characters that are the letter ``a``; 0 for an empty one."""
    return [text.count(LETTER) / len(text) if text else 0.0 for text in completions]
