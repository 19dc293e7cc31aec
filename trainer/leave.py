"""The way out of the process, and what its exit codes mean."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

EXIT_DONE, EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 0, 1, 2, 130
"""Interrupted: after what could be kept was written."""


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
