"""Chrome trace events: what ran when, for Perfetto (https://ui.perfetto.dev) or ``chrome://tracing``.

Format: "Trace Event Format", the JSON object form with complete (``X``), counter (``C``) and metadata (``M``) events.
The file is valid JSON after every flush: new events overwrite the closing brackets and write them again.
"""

from __future__ import annotations

import contextlib
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

ROLLOUTS = ": rollouts"
"""Behind the name of an engine: the counter of the rollouts that it has."""

_TAIL = b"\n]}\n"
_FLUSH_EVENTS = 256
_FLUSH_SECONDS = 5.0
_REMEMBERED = 256  # intervals a row remembers to decide whether another one nests
_ROWS_PER_TRACK = 1000
_COUNTER_GAP = 0.5  # seconds between two events of a counter, unless it changes more slowly
_COUNTER_EVENTS = 8000  # of all counters; after so many the gap doubles


@dataclass(slots=True)
class _Row:
    """One row of a track. Events of a row must nest, or viewers draw them wrongly."""

    thread: int
    closed: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    opened: float | None = None
    """When the span began that is open on it, in Unix seconds."""

    def fits(self, start: float, end: float) -> bool:
        """Whether a finished interval is disjoint from, inside, or around every other one."""
        slack = 1e-6  # seconds; the ends of nested parts are sums of rounded numbers
        if self.opened is not None and end > self.opened + slack:
            return False
        return all(
            end <= s + slack
            or start >= e - slack
            or (start <= s + slack and end >= e - slack)
            or (start >= s - slack and end <= e + slack)
            for s, e in self.closed
        )


@dataclass(slots=True)
class _Counter:
    """When a counter was written last, and what it has come to since: (Unix seconds, value)."""

    written: float = 0.0
    newest: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class OpenSpan:
    """Something that is going on: its track and name, and when it began, in seconds of ``time.monotonic``."""

    track: str
    name: str
    began: float


class Trace:
    """Writes ``trace.json``. Safe to use from threads and from coroutines; memory is bounded.

    Spans of one track that are open at the same time (two groups on their way) get rows of their own. After
    ``max_events`` further events are dropped and counted in the file. With ``append`` an existing file of ours is
    continued on the same time axis, else it is replaced.
    """

    def __init__(self, path: str | os.PathLike[str], *, append: bool = False, max_events: int = 500_000) -> None:
        self._lock = threading.Lock()
        self._buffer: list[bytes] = []
        self._tracks: dict[str, list[_Row]] = {}
        self._open: dict[int, OpenSpan] = {}
        self.ended = 0
        """How many spans and intervals have ended: while that stays the same, nothing comes to its end."""
        self._counters: dict[str, _Counter] = {}
        self._counter_gap, self._counted = _COUNTER_GAP, 0
        self._written = self._dropped = self._next_thread = 0
        self._max_events = max_events
        self._flushed_at = time.monotonic()
        self._file, self._epoch, self._comma = _open(Path(path), append)
        # One process row a start of the run: thread numbers of an earlier start keep their names.
        self._process = os.getpid()
        self._metadata("process_name", 0, name="midflight")
        for track in TRACKS:
            self._new_row(track)
        self.flush()

    @contextlib.contextmanager
    def span(self, track: str, name: str, **args: Any) -> Iterator[None]:
        """Record the time that the body takes, on a row that no other span is open on."""
        clock, start = time.perf_counter(), time.time()
        with self._lock:
            row = next((row for row in self._rows(track) if row.opened is None), None) or self._new_row(track)
            row.opened = start
            span = OpenSpan(track, name, time.monotonic())
            self._open[id(span)] = span
        try:
            yield
        finally:
            with self._lock:
                row.opened = None
                del self._open[id(span)]
                self._complete(row, name, start, time.perf_counter() - clock, args)

    def complete(self, track: str, name: str, start: float, seconds: float, **args: Any) -> None:
        """Record something that has ended: ``start`` in Unix seconds (``time.time()``), for example in an actor.

        A part goes on the row of the whole, whichever of them is recorded first.
        """
        with self._lock:
            end = start + seconds
            row = next((row for row in self._rows(track) if row.fits(start, end)), None) or self._new_row(track)
            self._complete(row, name, start, seconds, args)

    def counter(self, name: str, value: float, at: float | None = None) -> None:
        """Record what a quantity has come to, now or ``at`` a moment in Unix seconds: it stays so until the next call.

        Of quick changes the last one is kept, and the longer a run, the fewer: a curve must not crowd out the spans.
        """
        at = time.time() if at is None else at
        with self._lock:
            counter = self._counters.setdefault(name, _Counter())
            if at - counter.written < self._counter_gap:
                counter.newest = (at, value)
                return
            self._write_newest(name, counter)
            self._count(name, at, value)
            counter.written = at

    def open_spans(self) -> list[OpenSpan]:
        """What is going on at this moment, in the order in which it began."""
        with self._lock:
            return sorted(self._open.values(), key=lambda span: span.began)

    def flush(self) -> None:
        """Write what is buffered; the file is valid JSON afterwards."""
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Write the rest and close. Later events are ignored. Safe to call more than once."""
        with self._lock:
            if self._file.closed:
                return
            for name, counter in self._counters.items():
                self._write_newest(name, counter)
            if self._dropped:
                self._max_events += 1
                self._metadata("process_labels", 0, labels=f"{self._dropped} later events dropped")
            self._flush()
            self._file.close()

    def _rows(self, track: str) -> list[_Row]:
        if track not in self._tracks:
            self._new_row(track)
        return self._tracks[track]

    def _new_row(self, track: str) -> _Row:
        """A new row of the track; past a limit the last one, so that a leak of spans cannot grow without end."""
        rows = self._tracks.setdefault(track, [])
        if len(rows) >= _ROWS_PER_TRACK:
            return rows[-1]
        self._next_thread += 1
        row = _Row(self._next_thread)
        rows.append(row)
        order = list(self._tracks).index(track)
        self._metadata("thread_name", row.thread, name=track if len(rows) == 1 else f"{track} ({len(rows)})")
        self._metadata("thread_sort_index", row.thread, sort_index=order * _ROWS_PER_TRACK + len(rows))
        return row

    def _complete(self, row: _Row, name: str, start: float, seconds: float, args: dict[str, Any]) -> None:
        self.ended += 1
        row.closed.append((start, start + seconds))
        event = {"ph": "X", "name": name, "tid": row.thread, "ts": self._ts(start), "dur": round(seconds * 1e6, 1)}
        self._emit({**event, "args": args})

    def _write_newest(self, name: str, counter: _Counter) -> None:
        if counter.newest is not None:
            self._count(name, *counter.newest)
            counter.newest = None

    def _count(self, name: str, at: float, value: float) -> None:
        self._counted += 1
        if self._counted % _COUNTER_EVENTS == 0:
            self._counter_gap *= 2
        self._emit({"ph": "C", "name": name, "tid": 0, "ts": self._ts(at), "args": {"value": value}})

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
