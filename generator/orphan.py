"""An engine's processes end with the engine.

vLLM's engine core is a child of the process that made the engine. When that process is killed, the child would go on,
holding its memory or its GPU, because vLLM has nothing that would tell it (seen with vLLM 0.32).
"""

from __future__ import annotations

import os
import threading
import time

PARENT_VARIABLE = "MIDFLIGHT_ENGINE_PID"
"""Environment variable with the process id of the engine, read by the processes that vLLM starts for it."""

POLL_SECONDS = 1.0


def announce_parent() -> None:
    """Tell the processes that will be started from here whose they are."""
    os.environ[PARENT_VARIABLE] = str(os.getpid())


def end_with_parent() -> None:
    """In a direct child of an engine: end this process soon after the engine has died. Elsewhere: do nothing."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None or os.getppid() != int(parent):
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
