"""For tests with deadlines of hundredths of a second: on a busy machine those would pass although nothing hangs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any

from generator import virtual_time


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A decorator: the test runs on a loop whose time passes only while everybody waits."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        virtual_time.run(test(*arguments, **named))

    return run
