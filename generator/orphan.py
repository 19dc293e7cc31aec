"""An engine's processes end with the engine.

vLLM's engine core is a child of the process that made the engine. When that process is killed, the child would go on,
holding its memory or its GPU, because vLLM has nothing that would tell it (seen with vLLM 0.32).
"""

from __future__ import annotations

import multiprocessing
import os
import threading

PARENT_VARIABLE = "MIDFLIGHT_ENGINE_PID"
"""Environment variable with the process id of the engine, read by the processes that vLLM starts for it."""


def announce_parent() -> None:
    """Tell the processes that will be started from here whose they are."""
    os.environ[PARENT_VARIABLE] = str(os.getpid())


def end_with_parent() -> None:
    """In a process that an engine started: end it as soon as the engine has died. Elsewhere: do nothing."""
    parent = multiprocessing.parent_process()
    if parent is None or str(parent.pid) != os.environ.get(PARENT_VARIABLE):
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
