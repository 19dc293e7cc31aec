"""Foreign code that may block or hang, in threads that nothing waits for at the end of the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any


async def in_daemon_thread(function: Callable[[], Any], name: str) -> Any:
    """Run ``function`` in a daemon thread of its own and return its result.

    A thread cannot be stopped from outside: when the caller is cancelled, a function that hangs is abandoned with its
    thread. An executor would wait for it when the process ends. What the function raises is raised here; what a
    coroutine must not raise (``StopIteration``, ``SystemExit`` and the like) as ``RuntimeError``.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def deliver(result: Any, error: BaseException | None) -> None:
        if done.done():  # the caller has gone
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result, raised = None, None
        try:
            result = function()
        except BaseException as error:
            raised = error
        if raised is not None and (not isinstance(raised, Exception) or isinstance(raised, StopIteration)):
            cause, raised = raised, RuntimeError(f"{type(raised).__name__}: {raised}")
            raised.__cause__ = cause
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, result, raised)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
