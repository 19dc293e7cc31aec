"""What to say of an exception out of code that a user brought: its type, its text, and the line that raised it."""

from __future__ import annotations

import sysconfig
import traceback

from trainer.wording import clipped, one_line

LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def raised(error: BaseException) -> str:
    """``KeyError: 'question' (my_task.py:12)``: the innermost line that is not of a library."""
    what = type(error).__name__
    if text := one_line(str(error)):
        what += f": {text if len(text) <= 300 else clipped(text)}"
    if isinstance(error, SyntaxError) and error.filename:  # of the module that was imported, not of who did
        return what
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*LIBRARIES, "<"))]
    if not own:
        return what
    return f"{what} ({own[-1].filename}:{own[-1].lineno})"
