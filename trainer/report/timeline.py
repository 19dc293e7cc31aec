"""What ran when: the trace as a picture's worth of lanes, however long the run was."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.report.lanes import Lane, Level, Pauses
from trainer.watch.charts import PHASES
from trainer.watch.read_folder import number
from trainer.watch.trace import ROLLOUTS

BINS = 4000
"""Points in time at which the number of groups on their way is shown."""
ENGINE_BINS = 1000
"""Points in time at which the number of rollouts of one engine is shown."""
ENGINES = 48
"""Engines that have a lane of their own; more are named in a note."""

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Span:
    """Something that went on: in seconds since the trace began, on a track."""

    track: str
    start: float
    stop: float
    name: str


@dataclass(frozen=True, slots=True)
class _Count:
    """So many rollouts an engine had from this moment on."""

    at: float
    engine: str
    rollouts: float


@dataclass
class _Extent:
    """What has to be known before the lanes are filled: when the trace begins and ends, and which engines there are."""

    begin: float = float("inf")
    end: float = float("-inf")
    engines: dict[str, None] = field(default_factory=dict)
    """In order of appearance."""
    ends: dict[int, float] = field(default_factory=dict)
    """When each start of the run, by its number, wrote last."""


def timeline(events: Iterable[Event]) -> dict[str, Any] | None:
    """The lanes of the picture, times in seconds since the trace began; ``None`` without a span.

    ``sampling`` and ``scoring``: how many groups were with the engines, and with their rewards, on average over each of
    equal parts of the time. ``engines``: (name, how many rollouts it had, the same way). ``learner``, ``pushes``,
    ``phases``, ``paused`` and ``evaluations``: segments ``[start, end, name]``. ``events`` are gone through twice, and
    not held.
    """
    extent = _extent(events)
    if extent.begin > extent.end:
        return None
    begin, end = extent.begin, extent.end
    levels = {track: Level(begin, end, BINS) for track in ("engine", "reward")}
    names = ("learner", "pushes", "phases", "paused", "evaluations")
    lanes = {name: Lane(end - begin) for name in names}
    tracks, pauses, engines = _Tracks(), Pauses(), _Engines(extent)
    for start_of_run, event in _by_start(events):
        if counted := _count(event):
            engines.add(start_of_run, counted)
        if (span := tracks.span(event)) is None:
            continue
        if span.track in levels:
            levels[span.track].add(span.start, span.stop)
        elif span.track == "push":
            lanes["phases" if span.name in PHASES else "pushes"].add(span.start, span.stop, span.name)
            if (pause := pauses.pause(span.start, span.stop, span.name)) is not None:
                lanes["paused"].add(*pause, "paused")
        elif span.track in ("learner", "evaluation"):
            lanes["learner" if span.track == "learner" else "evaluations"].add(span.start, span.stop, span.name)
    return {
        "start": round(begin, 3),
        "end": round(end, 3),
        "sampling": levels["engine"].values(),
        "scoring": levels["reward"].values(),
        "engines": engines.lanes(),
        "more_engines": max(0, len(extent.engines) - ENGINES),
        **{name: lane.segments() for name, lane in lanes.items()},
    }


class _Engines:
    """How many rollouts each engine had that has a lane: what a counter says holds until it says other."""

    def __init__(self, extent: _Extent) -> None:
        names = list(extent.engines)[:ENGINES]
        self._levels = {name: Level(extent.begin, extent.end, ENGINE_BINS) for name in names}
        self._ends = extent.ends
        self._newest: dict[tuple[int, str], _Count] = {}

    def add(self, start_of_run: int, counted: _Count) -> None:
        """Counts of one engine come in the order of time."""
        if counted.engine in self._levels:
            self._until(counted.at, self._newest.get((start_of_run, counted.engine)))
            self._newest[start_of_run, counted.engine] = counted

    def lanes(self) -> list[tuple[str, list[float]]]:
        """(name, rollouts in equal parts of the time) of each; the last count holds to the end of that start."""
        for (start_of_run, _), counted in self._newest.items():
            self._until(self._ends.get(start_of_run, counted.at), counted)
        self._newest = {}
        return [(name, level.values()) for name, level in self._levels.items()]

    def _until(self, moment: float, counted: _Count | None) -> None:
        if counted is not None and moment > counted.at:
            self._levels[counted.engine].add(counted.at, moment, counted.rollouts)


class _Tracks:
    """Which track each row is of: a track has several, ``engine``, ``engine (2)``, ...; a restart names them anew."""

    def __init__(self) -> None:
        self._names: dict[tuple[Any, Any], str] = {}

    def span(self, event: Event) -> _Span | None:
        """The span that an event is, if it is one."""
        row = (event.get("pid"), event.get("tid"))
        try:
            if event["ph"] == "M" and event["name"] == "thread_name":
                self._names[row] = re.sub(r" \(\d+\)$", "", str(event["args"]["name"]))
            elif (times := _times(event)) is not None:
                return _Span(self._names.get(row, ""), *times, str(event["name"]))
        except (KeyError, TypeError):  # an event of another program, or one that was written over
            return None
        return None


def _extent(events: Iterable[Event]) -> _Extent:
    extent = _Extent()
    for start, event in _by_start(events):
        times = _times(event)
        if counted := _count(event):
            extent.engines[counted.engine] = None
            times = (counted.at, counted.at)
        if times is not None:
            extent.begin, extent.end = min(extent.begin, times[0]), max(extent.end, times[1])
            extent.ends[start] = max(times[1], extent.ends.get(start, times[1]))
    return extent


def _by_start(events: Iterable[Event]) -> Iterator[tuple[int, Event]]:
    """Each event with the number of the start of the run that wrote it: each names its process first."""
    start = 0
    for event in events:
        start += event.get("ph") == "M" and event.get("name") == "process_name"
        yield start, event


def _times(event: Event) -> tuple[float, float] | None:
    """Start and end of an event that is a span."""
    if event.get("ph") != "X":
        return None
    start, seconds = number(event.get("ts")), number(event.get("dur"))
    if start is None or seconds is None or start < 0 or seconds < 0:
        return None
    return start / 1e6, (start + seconds) / 1e6


def _count(event: Event) -> _Count | None:
    """What an event says that counts the rollouts of an engine."""
    if event.get("ph") != "C" or not str(event.get("name")).endswith(ROLLOUTS):
        return None
    at, counted = number(event.get("ts")), event.get("args")
    rollouts = number(counted.get("value")) if isinstance(counted, dict) else None
    if at is None or at < 0 or rollouts is None:
        return None
    return _Count(at / 1e6, str(event["name"]).removesuffix(ROLLOUTS), rollouts)
