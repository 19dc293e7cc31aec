"""Chrome trace events: what ran when, for Perfetto (https://ui.perfetto.dev) or ``chrome://tracing``.

Format: "Trace Event Format", the JSON object form with complete (``X``), instant (``i``) and metadata (``M``) events.
The file is valid JSON after every flush: new events overwrite the closing brackets and write them again.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)

TRACKS = ("engine", "push", "learner", "reward")
"""Tracks in the order in which they are shown; further ones follow in order of appearance."""

_TAIL = b"\n]}\n"
_FLUSH_EVENTS = 256
_FLUSH_SECONDS = 5.0
_REMEMBERED = 256  # intervals a lane remembers to decide whether another one nests
_LANES_PER_TRACK = 1000

_open_spans: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar("trace_open_spans", default=())


@dataclass(slots=True)
class _Lane:
    """One row of a track. Events of a row must nest, or viewers draw them wrongly."""

    thread: int
    closed: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    open: dict[int, float] = field(default_factory=dict)

    def fits(self, start: float, end: float) -> bool:
        """Whether a finished interval is disjoint from, inside, or around every other one."""
        slack = 1e-6  # seconds; the ends of nested parts are sums of rounded numbers
        if any(end > opened + slack and start < opened - slack for opened in self.open.values()):
            return False
        return all(
            end <= s + slack
            or start >= e - slack
            or (start <= s + slack and end >= e - slack)
            or (start >= s - slack and end <= e + slack)
            for s, e in self.closed
        )


class Trace:
    """Writes ``trace.json``. Safe to use from threads and from coroutines; memory is bounded.

    Spans of one track that overlap without nesting (two requests at a time) get rows of their own. After
    ``max_events`` further events are dropped and counted in the file. With ``append`` an existing file of ours is
    continued on the same time axis, else it is replaced.
    """

    def __init__(self, path: str | os.PathLike[str], *, append: bool = False, max_events: int = 500_000) -> None:
        self._lock = threading.Lock()
        self._buffer: list[bytes] = []
        self._tracks: dict[str, list[_Lane]] = {}
        self._written = self._dropped = self._next_thread = 0
        self._next_span = 1
        self._max_events = max_events
        self._flushed_at = time.monotonic()
        self._file, self._epoch, self._comma = _open(Path(path), append)
        # One process row a start of the run: thread numbers of an earlier start keep their names.
        self._process = os.getpid()
        self._metadata("process_name", 0, name="midflight")
        for track in TRACKS:
            self._lane(track)
        self.flush()

    @contextlib.contextmanager
    def span(self, track: str, name: str, **args: Any) -> Iterator[None]:
        """Record the time that the body takes. Nests within the spans around it in the same task or thread."""
        start, clock = time.time(), time.perf_counter()
        ancestors = _open_spans.get()
        with self._lock:
            span = self._next_span
            self._next_span += 1
            lane = next(
                (lane for lane in self._lanes(track) if all(other in ancestors for other in lane.open)), None
            ) or self._lane(track)
            lane.open[span] = start
        token = _open_spans.set((*ancestors, span))
        try:
            yield
        finally:
            # A generator closed from another context (an abandoned coroutine) cannot reset the variable.
            with contextlib.suppress(ValueError):
                _open_spans.reset(token)
            with self._lock:
                lane.open.pop(span)
                self._complete(lane, name, start, time.perf_counter() - clock, args)

    def complete(self, track: str, name: str, start: float, seconds: float, **args: Any) -> None:
        """Record something that has ended: ``start`` in Unix seconds (``time.time()``), for example in an actor."""
        with self._lock:
            end = start + seconds
            lane = next((lane for lane in self._lanes(track) if lane.fits(start, end)), None) or self._lane(track)
            self._complete(lane, name, start, seconds, args)

    def instant(self, track: str, name: str, **args: Any) -> None:
        """Mark a moment, such as the publication of a version."""
        with self._lock:
            lane = self._lanes(track)[0]
            self._emit(
                {"ph": "i", "s": "t", "name": name, "tid": lane.thread, "ts": self._ts(time.time()), "args": args}
            )

    def flush(self) -> None:
        """Write what is buffered; the file is valid JSON afterwards."""
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Write the rest and close. Later events are ignored. Safe to call more than once."""
        with self._lock:
            if self._file.closed:
                return
            if self._dropped:
                self._max_events += 1
                self._metadata("process_labels", 0, labels=f"{self._dropped} later events dropped")
            self._flush()
            self._file.close()

    def _lanes(self, track: str) -> list[_Lane]:
        if track not in self._tracks:
            self._lane(track)
        return self._tracks[track]

    def _lane(self, track: str) -> _Lane:
        """A new row of the track; past a limit the last one, so that a leak of spans cannot grow without end."""
        lanes = self._tracks.setdefault(track, [])
        if len(lanes) >= _LANES_PER_TRACK:
            return lanes[-1]
        self._next_thread += 1
        lane = _Lane(self._next_thread)
        lanes.append(lane)
        order = list(self._tracks).index(track)
        self._metadata("thread_name", lane.thread, name=track if len(lanes) == 1 else f"{track} ({len(lanes)})")
        self._metadata("thread_sort_index", lane.thread, sort_index=order * _LANES_PER_TRACK + len(lanes))
        return lane

    def _complete(self, lane: _Lane, name: str, start: float, seconds: float, args: dict[str, Any]) -> None:
        lane.closed.append((start, start + seconds))
        event = {"ph": "X", "name": name, "tid": lane.thread, "ts": self._ts(start), "dur": round(seconds * 1e6, 1)}
        self._emit({**event, "args": args})

    def _metadata(self, kind: str, thread: int, **args: Any) -> None:
        self._emit({"ph": "M", "name": kind, "tid": thread, "ts": 0, "args": args})

    def _ts(self, unix_seconds: float) -> float:
        """Microseconds since the start of the run: small enough for a double to hold exactly."""
        return round((unix_seconds - self._epoch) * 1e6, 1)

    def _emit(self, event: dict[str, Any]) -> None:
        if self._written >= self._max_events:
            self._dropped += 1
            return
        self._written += 1
        self._buffer.append(json.dumps({"pid": self._process, **event}, default=str).encode())
        if len(self._buffer) >= _FLUSH_EVENTS or time.monotonic() - self._flushed_at > _FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        self._flushed_at = time.monotonic()
        if self._file.closed or not self._buffer:
            return
        events, self._buffer = b",\n".join(self._buffer), []
        try:
            self._file.seek(-len(_TAIL), os.SEEK_END)
            self._file.write((b",\n" if self._comma else b"") + events + _TAIL)
            self._file.flush()
            self._comma = True
        except OSError as error:
            # A full disk must not end the training that the trace describes.
            with contextlib.suppress(OSError):  # closing tries to write once more
                self._file.close()
            logger.warning("the trace ends here: %s cannot be written (%s)", self._file.name, error)


def _open(path: Path, append: bool) -> tuple[BinaryIO, float, bool]:
    """The file positioned for events, its epoch in Unix seconds, and whether events stand in it already."""
    if append and path.exists():
        try:
            content = json.loads(path.read_bytes())
            file = open(path, "r+b")  # noqa: SIM115 - the trace owns it
            return file, float(content["otherData"]["epoch"]), bool(content["traceEvents"])
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("%s is no trace of ours and is replaced (%s)", path, error)
    epoch = time.time()
    head = json.dumps({"displayTimeUnit": "ms", "otherData": {"epoch": epoch}})[:-1] + ', "traceEvents": [\n'
    file = open(path, "w+b")  # noqa: SIM115 - the trace owns it
    file.write(head.encode() + _TAIL)
    file.flush()
    return file, epoch, False
