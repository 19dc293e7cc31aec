"""The process behind :mod:`recipes.bounded`: a program that imports a module, forks, and calls its functions there.

``python bounded_process.py MODULE MEBIBYTES``. Requests come on standard input, each a length of four bytes and JSON
``[number, function, arguments, seconds]``; answers go to standard output as JSON lines. The process that imported never
calls, so nothing that a call does to it is lost when the operating system ends the fork.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import struct
import sys
from types import ModuleType
from typing import Any

WALL_FACTOR = 10
"""Wall time that a call may take, in its processor time: the machine does other things too, and a call may wait."""
CAUSES: dict[int, str] = {
    signal.SIGPROF: "took more processor time than it may",
    signal.SIGALRM: "took more time than it may",
    signal.SIGKILL: "was killed, as by a machine without memory",
}


def main(name: str, memory_mib: int) -> None:
    """Answer requests until there are no more."""
    requests, answers = _pipes()
    try:
        module = importlib.import_module(name)
    except BaseException as error:  # told to the one who asks: this process has no other way to say it
        _tell(answers, unusable=f"{type(error).__name__}: {error}")
        return
    _tell(answers, ready=True)
    while True:
        fork = os.fork()
        if fork == 0:
            _serve(module, requests, answers, memory_mib << 20)
            os._exit(0)
        _, status = os.waitpid(fork, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return
        _tell(answers, cut=CAUSES.get(-code, f"ended its process with exit code {code}"))


def _pipes() -> tuple[int, int]:
    """Descriptors for requests and answers. What is called can neither read the former nor print into the latter."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nothing, standard)
    return requests, answers


def _serve(module: ModuleType, requests: int, answers: int, memory: int) -> None:
    _limit(memory)
    while (length := _read(requests, 4)) is not None:
        request = _read(requests, struct.unpack(">I", length)[0])
        if request is None:
            return
        number, function, arguments, seconds = json.loads(request)
        # The default action of both signals ends the process, whatever instruction it is in.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * seconds)
        answer = _answer(module, function, arguments)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _tell(answers, number=number, **answer)


def _answer(module: ModuleType, function: str, arguments: list[Any]) -> dict[str, Any]:
    try:
        value = getattr(module, function)(*arguments)
        json.dumps(value)
        return {"value": value}
    except MemoryError:
        return {"cut": "took more memory than it may"}
    except BaseException as error:  # an answer too
        return {"raised": f"{type(error).__name__}: {error!s:.500}"}


def _limit(memory: int) -> None:
    """Bound the fork: its memory, and no file that it writes may have a size."""
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    for limit, value in ((resource.RLIMIT_AS, mapped + memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _read(descriptor: int, count: int) -> bytes | None:
    """``count`` bytes, or ``None`` where the requests end. Not a byte more: the next fork goes on behind them."""
    data = b""
    while len(data) < count:
        part = os.read(descriptor, count - len(data))
        if not part:
            return None
        data += part
    return data


def _tell(answers: int, **answer: Any) -> None:
    line = json.dumps(answer).encode() + b"\n"
    while line:
        line = line[os.write(answers, line) :]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
