"""An event loop whose time passes only while everybody waits: hours of timeouts and sleeps take no time.

What runs on it cannot tell the difference: ``asyncio.sleep``, ``asyncio.timeout`` and ``loop.time()`` go by the loop's
clock. A program without randomness of its own takes the same course every time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class DeadlockError(RuntimeError):
    """Everybody waits, and for nothing that time could bring."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0 seconds. Work for a thread is done at once, in the caller's thread, and takes no virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_NeverSleeping(self))

    def time(self) -> float:
        return self.now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Arguments], T], *args: *Arguments
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class _NeverSleeping(selectors.DefaultSelector):
    """Where an ordinary loop would sleep until its next timer, time jumps there instead."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if events := super().select(0):
            return events
        if timeout is None:
            raise DeadlockError(f"at {self._loop.now:.3f} s of virtual time everybody waits for somebody else")
        self._loop.now += max(0.0, timeout)
        return []


def run(program: Coroutine[Any, Any, T]) -> T:
    """Run ``program`` to its end in virtual time. Raises :class:`DeadlockError` when it waits for what never comes."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(program)
