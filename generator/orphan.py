"""An engine's processes end with the engine.

vLLM's engine core is a child of the process that made the engine. When that process is killed, the child would go on,
holding its memory or its GPU, because vLLM has nothing that would tell it (seen with vLLM 0.32).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator

PARENT_VARIABLE = "MIDFLIGHT_ENGINE_PID"
"""Environment variable with the process id of the engine, read by the processes that vLLM starts for it."""
LOOK_SECONDS = 0.5
"""How often a process looks whether the engine that started it is still there."""


def announce_parent() -> None:
    """Tell the processes that will be started from here whose they are."""
    os.environ[PARENT_VARIABLE] = str(os.getpid())


@contextlib.contextmanager
def ending_with_parent() -> Iterator[None]:
    """In a process that an engine started, end it as long as this lasts as soon as the engine has died.

    For a process that will be forked: afterwards there is no thread any more. Elsewhere this does nothing.
    """
    parent = os.environ.get(PARENT_VARIABLE)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_SECONDS):
            if str(os.getppid()) != parent:
                os._exit(1)

    thread = threading.Thread(target=watch, name="ending-with-parent", daemon=True)
    if parent is not None and parent != str(os.getpid()):
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


def end_with_parent() -> None:
    """In a process that an engine started: end it as soon as the engine has died. Elsewhere: do nothing."""
    parent = multiprocessing.parent_process()
    if parent is None or str(parent.pid) != os.environ.get(PARENT_VARIABLE):
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
