"""Calls in a process of their own, bounded in processor time and memory: for code that judges what a model wrote.

A verifier that reads mathematics can be made to compute ``9^9^9^9``: inside one instruction of the interpreter, which
holds its lock meanwhile. Neither a thread nor a signal handler of Python ends that, and a run whose verifier does it
stands still. Here the operating system ends the process that does it. This bounds what an answer can cost; it is no
sandbox: what is called has the rights of the run.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""A fork makes the threads of numpy anew, and on a machine of many cores their stacks alone take what memory it has."""
PROGRAM = Path(__file__).with_name("bounded_process.py")


class CallCutError(Exception):
    """The operating system ended the call, for the time or memory it took. The message says which."""


class CallFailedError(Exception):
    """What was called raised, or its process cannot start or has died. The message says what was raised."""


class BoundedCalls:
    """Calls functions of ``module`` in another process; arguments and results are what JSON holds.

    A call may take ``seconds`` of processor time, ten times that of wall time, and ``memory_mib`` more memory than the
    process has without it. The process imports the module once and forks; the fork makes the calls, and where one is
    cut, another fork goes on: that costs no second import. Strings hash the same in every process.

    May be called from several threads at a time, each of which gets a process of its own. A process that has nothing to
    do waits for the next call, and ends with the process that started it. Nothing starts before the first call.
    """

    def __init__(self, module: str, *, seconds: float = 3.0, memory_mib: int = 1024) -> None:
        self._command = [sys.executable, "-P", str(PROGRAM), module, str(memory_mib)]
        self._seconds = seconds
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._owner = os.getpid()

    def __call__(self, function: str, *arguments: Any, seconds: float | None = None) -> Any:
        """What the module's ``function`` returns; ``seconds`` replaces those of all calls for this one.

        Raises :class:`CallCutError` or :class:`CallFailedError`.
        """
        process = self._take()
        try:
            return process.ask(function, arguments, self._seconds if seconds is None else seconds)
        finally:
            if process.usable:
                with self._lock:
                    self._idle.append(process)

    def _take(self) -> _Process:
        with self._lock:
            if self._owner != os.getpid():  # a fork of ours: the pipes are its parent's
                self._idle, self._owner = [], os.getpid()
            while self._idle:
                process = self._idle.pop()
                if process.lives:
                    return process
        return _Process(self._command)


class _Process:
    """One process, and the pipes to it: a request is answered before the next one is sent."""

    def __init__(self, command: list[str]) -> None:
        self.usable = False
        """Whether the next call may be sent to it."""
        paths = [path or os.getcwd() for path in sys.path]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # The same modules are found there. Sets of strings have the same order each time: what is generated from a
            # seed is then the same in every process.
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0"},
            start_new_session=True,  # Ctrl-C is for the run, which may still want answers
        )
        self._number = 0
        self._answered({"ready"})
        self.usable = True

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def ask(self, function: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        self._number += 1
        request = json.dumps([self._number, function, arguments, seconds]).encode()
        self.usable = False
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(struct.pack(">I", len(request)) + request)
            self._process.stdin.flush()
        except OSError as error:
            raise CallFailedError(f"its process has ended: {error}") from error
        answer = self._answered({"value", "raised", "cut"})
        self.usable = True
        if "cut" in answer:
            raise CallCutError(answer["cut"])
        if "raised" in answer:
            raise CallFailedError(answer["raised"])
        return answer["value"]

    def _answered(self, kinds: set[str]) -> dict[str, Any]:
        """The next answer of one of ``kinds`` that belongs to the last request, or to none."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            if "unusable" in answer:
                raise CallFailedError(answer["unusable"])
            if kinds & answer.keys() and answer.get("number", self._number) == self._number:
                return answer
        raise CallFailedError(f"its process has ended with exit code {self._process.wait()}")
