"""A part of the algorithm that the configuration chooses by name, and what the documentation says about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.dotted import resolve_dotted


@dataclass(frozen=True, slots=True)
class Choice:
    """A built-in function and its row in ``docs/reference/algorithms.md``."""

    function: Callable[..., Any]
    formula: str
    source: str
    off_policy: str
    """When to use it on data that older policies sampled."""
    keys: tuple[str, ...] = ()
    """The keys below ``algorithm`` that it reads; the page shows their defaults."""


def chosen(choices: Mapping[str, Choice], name: str) -> Callable[..., Any]:
    """The function behind a name: a built-in, or the user's own where ``name`` is a dotted path.

    ``trainer.allowed`` has refused every other name before anything starts. Raises ``KeyError`` for an unknown name
    without a dot, and :class:`trainer.dotted.DottedPathError` for a path that names nothing.
    """
    return resolve_dotted(name, "algorithm") if "." in name else choices[name].function
