"""What fills the lanes of a timeline, event by event, in memory that does not grow with the run."""

from __future__ import annotations

import re
from collections.abc import Iterable

SEGMENTS = 3000
"""Segments of a lane at most; past that, neighbours of one kind are put together."""

Segment = tuple[float, float, str]
"""Start and end in seconds since the trace began, and what it was."""

Part = tuple[float, float, str, str]
"""A segment that may be several: start and end, and what the first and the last of them were."""


class Level:
    """How many of something there were, on average, in each of ``bins`` equal parts of the time from begin to end."""

    def __init__(self, begin: float, end: float, bins: int) -> None:
        self._begin, self._width, self._bins = begin, (end - begin) / bins, bins
        self._partly = [0.0] * bins
        self._change = [0.0] * (bins + 1)

    def add(self, start: float, stop: float, count: float = 1.0) -> None:
        """``count`` of them were there from start to stop, in seconds."""
        if self._width <= 0:
            return
        first_at, last_at = (start - self._begin) / self._width, (stop - self._begin) / self._width  # in parts
        first, last = min(self._bins - 1, int(first_at)), min(self._bins - 1, int(last_at))
        if first == last:
            self._partly[first] += count * (last_at - first_at)
        else:
            self._partly[first] += count * (first + 1 - first_at)
            self._partly[last] += count * (last_at - last)
            self._change[first + 1] += count
            self._change[last] -= count

    def values(self) -> list[float]:
        """One number a part of the time."""
        shown, there = [], 0.0
        for part, change in zip(self._partly, self._change, strict=False):
            there += change
            shown.append(round(part + there, 2))
        return shown


class Lane:
    """What went on, as segments; where there are too many, near neighbours of one kind become one."""

    def __init__(self, seconds: float, limit: int = SEGMENTS) -> None:
        self._parts: list[Part] = []
        self._limit, self._seconds = limit, seconds
        self._gap = seconds / limit

    def add(self, start: float, stop: float, name: str) -> None:
        """It went on from start to stop."""
        self._parts.append((start, stop, name, name))
        if len(self._parts) > 2 * self._limit:
            self._thin()

    def segments(self) -> list[Segment]:
        """So many as the lane may have at most, in their order."""
        self._thin()
        return [(round(start, 3), round(stop, 3), _range(first, last)) for start, stop, first, last in self._parts]

    def _thin(self) -> None:
        self._parts.sort()
        while len(self._parts) > self._limit:
            self._parts = merged(self._parts, self._gap)
            if self._gap > self._seconds or not self._gap:  # more kinds than a run has: somebody else's trace
                del self._parts[self._limit :]
            self._gap *= 2


class Pauses:
    """When engines generated nothing because of a push: from the beginning of its gate to the end of its resume."""

    def __init__(self) -> None:
        self._gate: float | None = None

    def pause(self, start: float, stop: float, phase: str) -> tuple[float, float] | None:
        """The pause that this phase ends, if it ends one. Phases come in the order in which pushes go through them."""
        if phase == "gate":
            self._gate = start
        elif phase == "resume" and self._gate is not None:
            began, self._gate = self._gate, None
            return (began, stop)
        return None


def merged(parts: Iterable[Part], gap: float) -> list[Part]:
    """``parts`` in their order, neighbours put together that are of one kind and less than ``gap`` seconds apart.

    The kind of a name is the name without numbers.
    """
    newest: dict[str, int] = {}
    result: list[Part] = []
    for start, stop, first, last in sorted(parts):
        kind = re.sub(r"\d+", "#", first)
        place = newest.get(kind)
        if place is not None and start - result[place][1] < gap:
            before = result[place]
            result[place] = (before[0], max(stop, before[1]), before[2], last)
        else:
            newest[kind] = len(result)
            result.append((start, stop, first, last))
    return result


def _range(first: str, last: str) -> str:
    """``step 7 to 8``, where the two names differ only in their last number."""
    number = re.search(r"\d+$", last)
    return f"{first} to {number[0]}" if number and first != last else first
