"""What has no reward: for which cause, counted under its metric, and told once."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

logger = logging.getLogger(__name__)

CAUSES = ("failed", "timeout", "declined", "invalid", "wrong_length")
"""Why a value is missing; each is counted as the metric ``reward/<cause>``."""


class NotScoredError(Exception):
    """Why something has no value. ``cause`` is one of :data:`CAUSES`, the message goes on after the scorer's name."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Unscored:
    """The counts of one source of rewards, and which causes it has told already."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._told: set[tuple[str, str]] = set()

    def count(self, cause: str, values: int = 1) -> None:
        """``values`` more are missing, and that is nothing to warn of."""
        self._counts[cause] += values

    def tell(self, scorer: str, error: NotScoredError, values: int = 1) -> None:
        """Count, and say it once a scorer and cause as a warning; the counters tell how often it happens."""
        self.count(error.cause, values)
        level = logging.DEBUG if (scorer, error.cause) in self._told else logging.WARNING
        self._told.add((scorer, error.cause))
        logger.log(level, "%s %s; such values are excluded and counted", scorer, error, exc_info=error.__cause__)

    def take_counts(self) -> dict[str, int]:
        """How many values are missing since the last call, for every cause, as metrics."""
        counts = {f"reward/{cause}": self._counts[cause] for cause in CAUSES}
        self._counts.clear()
        return counts


LARGEST = 1e30
"""Rewards beyond this overflow in the sums of squares that follow, and no reward means it."""


def finite_number(value: Any) -> float | None:
    """``value`` as a float of at most ``LARGEST`` in size, or ``None`` when it is none."""
    if value is None or isinstance(value, str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST else None  # false for NaN too
