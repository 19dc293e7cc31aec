"""What ran when: the trace as a picture's worth of segments, however long the run was."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.report.series import PHASES

BINS = 4000
"""Points in time at which the number of groups on their way is shown."""
SEGMENTS = 3000
"""Segments of a lane at most; past that, neighbours of one kind are put together."""

Segment = tuple[float, float, str]
"""Start and end in seconds since the trace began, and what it was."""


def timeline(events: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The lanes of the picture, times in seconds since the trace began; ``None`` without a span.

    ``sampling`` and ``scoring``: how many groups were with the engines, and with their rewards, on average over each of
    equal parts of the time. ``learner``, ``pushes``, ``phases`` and ``paused``: segments ``[start, end, name]``.
    """
    tracks = _tracks(events)
    spans = [span for track in tracks.values() for span in track]
    if not spans:
        return None
    begin, end = min(start for start, _, _ in spans), max(end for _, end, _ in spans)
    pushes = [span for span in tracks["push"] if span[2] not in PHASES]
    phases = [span for span in tracks["push"] if span[2] in PHASES]
    return {
        "start": round(begin, 3),
        "end": round(end, 3),
        "sampling": occupancy(tracks["engine"], begin, end),
        "scoring": occupancy(tracks["reward"], begin, end),
        "learner": _thinned(tracks["learner"], end),
        "pushes": _thinned(pushes, end),
        "phases": _thinned(phases, end),
        "paused": _thinned(pauses(phases), end),
    }


def occupancy(spans: Sequence[Segment], begin: float, end: float, bins: int = BINS) -> list[float]:
    """How many of ``spans`` were open, on average, in each of ``bins`` equal parts of the time from begin to end."""
    width = (end - begin) / bins
    if width <= 0:
        return [0.0] * bins
    partly, change = [0.0] * bins, [0] * (bins + 1)
    for span in spans:
        start, stop = ((moment - begin) / width for moment in span[:2])  # in parts
        first, last = min(bins - 1, int(start)), min(bins - 1, int(stop))
        if first == last:
            partly[first] += stop - start
        else:
            partly[first] += first + 1 - start
            partly[last] += stop - last
            change[first + 1] += 1
            change[last] -= 1
    shown, open_spans = [], 0
    for part, step in zip(partly, change, strict=False):
        open_spans += step
        shown.append(round(part + open_spans, 2))
    return shown


def pauses(phases: Sequence[Segment]) -> list[Segment]:
    """When engines generated nothing because of a push: from the beginning of its gate to the end of its resume."""
    found, gate = [], None
    for start, end, phase in sorted(phases):
        if phase == "gate":
            gate = start
        elif phase == "resume" and gate is not None:
            found.append((gate, end, "paused"))
            gate = None
    return found


def merged(spans: Sequence[Segment], gap: float) -> list[Segment]:
    """``spans`` with neighbours put together that have names of one kind and are less than ``gap`` seconds apart.

    The kind of a name is the name without numbers: ``step 7`` and ``step 8`` become ``step 7 to 8``.
    """
    newest: dict[str, int] = {}
    result: list[tuple[float, float, str, str]] = []
    for start, end, name in sorted(spans):
        kind = re.sub(r"\d+", "#", name)
        place = newest.get(kind)
        if place is not None and start - result[place][1] < gap:
            before = result[place]
            result[place] = (before[0], max(end, before[1]), before[2], name)
        else:
            newest[kind] = len(result)
            result.append((start, end, name, name))
    return [(start, end, _range(first, last)) for start, end, first, last in result]


def _range(first: str, last: str) -> str:
    """``step 7 to 8``, where the two names differ only in their last number."""
    number = re.search(r"\d+$", last)
    return f"{first} to {number[0]}" if number and first != last else first


def _tracks(events: Iterable[Mapping[str, Any]]) -> defaultdict[str, list[Segment]]:
    """Spans by track. A track has several rows, named ``engine``, ``engine (2)``, ...; a restart names them anew."""
    names: dict[tuple[Any, Any], str] = {}
    tracks: defaultdict[str, list[Segment]] = defaultdict(list)
    for event in events:
        row = (event.get("pid"), event.get("tid"))
        try:
            if event["ph"] == "M" and event["name"] == "thread_name":
                names[row] = re.sub(r" \(\d+\)$", "", str(event["args"]["name"]))
            elif event["ph"] == "X":
                start, seconds = event["ts"] / 1e6, event["dur"] / 1e6
                if start >= 0 <= seconds:
                    tracks[names.get(row, "")].append((start, start + seconds, str(event["name"])))
        except (KeyError, TypeError, OverflowError):  # an event of another program, or one that was written over
            continue
    return tracks


def _thinned(spans: Sequence[Segment], end: float, limit: int = SEGMENTS) -> list[Segment]:
    gap = end / limit
    kept = sorted(spans)
    while len(kept) > limit:
        kept = merged(kept, gap)
        gap *= 2
    return [(round(start, 3), round(stop, 3), name) for start, stop, name in kept]
