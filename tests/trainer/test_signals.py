"""Ctrl-C in a process that has children of its own, without a run around it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from trainer.signals import SAME_SIGNAL_SECONDS, descendants

PROGRAM = """
import asyncio, subprocess, sys
from trainer import signals

if len(sys.argv) > 1:
    signals.SAME_SIGNAL_SECONDS = float(sys.argv[1])

async def main():
    # A child with a child, in a process group of its own: neither gets the signals that its parent gets.
    child = subprocess.Popen(["bash", "-c", "sleep 300 & wait"], start_new_session=True)
    with signals.interrupts(asyncio.current_task()):
        print("started", child.pid, flush=True)
        while True:
            try:
                await asyncio.sleep(300)
            except asyncio.CancelledError:
                print("asked to end", flush=True)  # and does not

asyncio.run(main())
"""


@pytest.fixture
def process(request):
    """The program above; a test's parameter is its argument."""
    words = [sys.executable, "-c", PROGRAM, *map(str, [request.param] if hasattr(request, "param") else [])]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as started:
        yield started
        started.kill()


def gone(pid: int) -> bool:
    """Whether a process has ended; one that waits for somebody to read its exit code has."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def all_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 120
    while not all(map(gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return all(map(gone, pids))


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_the_process_and_all_below_it_at_once(process, second):
    assert process.stdout.readline().startswith("started")
    while len(below := descendants(process.pid)) < 2:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked to end\n"
    time.sleep(1.5 * SAME_SIGNAL_SECONDS)
    assert process.poll() is None
    process.send_signal(second)
    assert process.wait(timeout=120) == 130
    assert all_gone(below)


@pytest.mark.parametrize("process", [600.0], indirect=True, ids=["a long moment"])
def test_a_signal_that_comes_twice_in_a_moment_is_one(process):
    assert process.stdout.readline().startswith("started")
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked to end\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert process.poll() is None
    for pid in descendants(process.pid):
        os.kill(pid, signal.SIGKILL)
