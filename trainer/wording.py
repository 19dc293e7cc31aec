"""Texts of others in a message of one paragraph."""

from __future__ import annotations


def one_line(text: str) -> str:
    """``text`` as one paragraph."""
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def clipped(value: str) -> str:
    """A value that was given, as far as a message needs it."""
    return value if len(value) <= 80 else f"{value[:80]}..."
