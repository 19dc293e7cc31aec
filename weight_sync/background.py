"""Work beside the caller's: in a thread that nothing waits for at exit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_thread(call: Callable[[], Result], name: str = "weight-transfer") -> Future[Result]:
    """Run ``call`` in a daemon thread. An executor's threads would be joined at exit, hanging on a silent peer."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
