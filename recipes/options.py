"""What the recipes' own options (``data.options``) have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from generator.task import DataError


def check_options(options: Mapping[str, Any], known: Sequence[str], choices: Mapping[str, Sequence[str]]) -> None:
    """Raise :class:`DataError` for a key that is not ``known``, and for one of ``choices`` with another value.

    Where one of the ``choices`` is not set it is "auto".
    """
    for key in options:
        if key not in known:
            raise DataError(f"data.options has no key {key!r} in this recipe; there are {', '.join(known)}")
    for key, allowed in choices.items():
        if options.get(key, "auto") not in allowed:
            raise DataError(f"data.options.{key} is {options[key]!r}; choose from {', '.join(allowed)}")


def check_whole_number(key: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise :class:`DataError` for a value that is no whole number, below ``least``, or above ``most``."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        at_most = "" if most is None else f" and at most {most}"
        raise DataError(f"data.options.{key} is {value!r}; it must be a whole number, at least {least}{at_most}")


def several(given: Any) -> tuple[Any, ...]:
    """A list as it is, and anything else as the one value that was given."""
    return tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
