"""Texts of others in a message of one paragraph."""

from __future__ import annotations

from typing import Any


def one_line(text: str) -> str:
    """``text`` as one paragraph."""
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


PATH = 300
"""Characters of a path: its end says what it is."""


def clipped(value: str, most: int = 80) -> str:
    """A value that was given, as far as a message needs it: ``most`` characters of it."""
    return value if len(value) <= most else f"{value[:most]}..."


def shown(value: Any) -> str:
    """Any value as it would be written in Python, as far as a message needs it."""
    try:
        return clipped(repr(value))
    except Exception as error:  # Python writes out no integer of thousands of digits; the rest is code of others
        return f"a {type(value).__name__} that cannot be written out ({type(error).__name__})"
