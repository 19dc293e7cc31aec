"""Ctrl-C and SIGTERM: the first asks a task to end, the second ends everything at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from trainer.leave import EXIT_INTERRUPTED

SAME_SIGNAL_SECONDS = 1.0


@contextlib.contextmanager
def interrupts(task: asyncio.Task[Any]) -> Iterator[None]:
    """The first SIGINT or SIGTERM cancels ``task``; a later one ends the process, and all that it started, at once.

    ``timeout`` and ``make`` send a signal to a process and to its group: what comes within a moment is the same one.
    """
    loop = asyncio.get_running_loop()
    first: list[float] = []

    def handle() -> None:
        if first and loop.time() - first[0] > SAME_SIGNAL_SECONDS:
            end_at_once()
        if not first:
            first.append(loop.time())
            task.cancel()

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def end_at_once(code: int = EXIT_INTERRUPTED) -> NoReturn:
    """Kill every process below this one, and end this one with ``code``, its output written.

    Ray's daemons would end by themselves too, but some of them only after a minute in which they look for the others.
    """
    for process in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: a signal came in the middle of a write
            stream.flush()
    os._exit(code)


def descendants(of: int) -> list[int]:
    """The ids of all processes below the process ``of``, children before their own children. Linux only."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name, in brackets, may hold anything: the parent's id is the second field behind it.
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [of]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found
