"""Temporary folders that a process which was killed leaves behind, and the next one of its kind removes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def temporary_folder(prefix: str, parent: Path | None) -> Iterator[Path]:
    """A new folder in ``parent`` (without one, where the system keeps such), removed afterwards.

    Its name has ``prefix``, the process and the host, so that folders of processes which are gone can be told from
    those in use, on hosts that share ``parent`` too: they are removed first.
    """
    where = Path(parent or tempfile.gettempdir())
    host = socket.gethostname()
    for path in where.glob(f"{prefix}*-{host}-*"):
        name = re.fullmatch(rf"{re.escape(prefix)}(\d+)-{re.escape(host)}-[^-]+", path.name)
        if name is not None and not _lives(int(name[1])):
            shutil.rmtree(path, ignore_errors=True)  # in a folder for all, it may be somebody else's
    with tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-{host}-", dir=where) as folder:
        yield Path(folder)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
