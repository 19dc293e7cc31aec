"""The way out of the process."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End the process with ``code``, exit handlers run, output written.

    Threads that were given up (a reward function that hangs, a wandb that does not answer) must neither hold the
    process up nor bring it down: Python's own way out joins the plain ones, and can abort in daemon threads that are
    inside native code (``FATAL: exception not rethrown``).
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
