"""What tests of the whole command share: it runs in a process of its own, and what it leaves behind is looked for."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments: str, module: str = "trainer") -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def environment() -> dict[str, str]:
    # The test's own processes are told apart from any other Ray on the machine by this mark in their environment.
    return {**os.environ, "WANDB_MODE": "offline", "MIDFLIGHT_TEST": str(os.getpid()), "PYTHONPATH": str(ROOT)}


def run(*arguments: str, module: str = "trainer", timeout: float = 900.0) -> subprocess.CompletedProcess[str]:
    """The command to its end."""
    return ended(command(*arguments, module=module), timeout)


def ended(words: list[str], timeout: float = 900.0) -> subprocess.CompletedProcess[str]:
    """Any command, whole, to its end."""
    return subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, env=environment(), cwd=ROOT, check=False
    )


DESCENDANTS: set[psutil.Process] = set()
"""Processes of commands seen while they ran. vLLM's engine core, which renames itself, loses the mark by that."""


def descendants(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def processes_of_this_test() -> list[psutil.Process]:
    found = []
    for process in {*psutil.process_iter(), *DESCENDANTS}:
        try:
            marked = process in DESCENDANTS or process.environ().get("MIDFLIGHT_TEST") == str(os.getpid())
            if marked and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def no_process_left(patience: float = 120.0) -> bool:
    """Whether every process of the command has ended; those that are on their way out get a moment."""
    deadline = time.monotonic() + patience
    while processes_of_this_test() and time.monotonic() < deadline:
        time.sleep(0.2)
    return not processes_of_this_test()


def act_after(
    line_like: str, act: Callable[[subprocess.Popen], None], folder: Path, *overrides: str
) -> tuple[int, str]:
    """Start the command, act on it after a line of output like a pattern; exit code and output."""
    process = subprocess.Popen(
        command("recipe=ci_tiny", "steps=10000", f"run_dir={folder}", "logger.wandb.mode=disabled", *overrides),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), cwd=ROOT,
    )  # fmt: skip
    output = []
    assert process.stdout is not None
    for line in process.stdout:
        output.append(line)
        if re.search(line_like, line):
            break
    else:
        pytest.fail(
            f"the command ended with {process.wait(timeout=60)} before a line like {line_like!r}:\n" + "".join(output)
        )
    DESCENDANTS.update(descendants(process))
    try:
        act(process)
        rest, _ = process.communicate(timeout=300)
    except BaseException:
        process.send_signal(signal.SIGTERM)  # nothing of this command may be left to the next test
        raise
    return process.returncode, "".join(output) + rest


def rows_of(*files: Path) -> dict[str, dict]:
    """The rows of files of rollouts, by the rollout's id, which no two have."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    by_id = {row["rollout_id"]: row for row in rows}
    assert len(by_id) == len(rows)
    return by_id
