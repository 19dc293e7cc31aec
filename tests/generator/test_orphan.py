"""Processes that an engine started, after the engine was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

ENGINE = """
import sys, time
from multiprocessing import forkserver, set_forkserver_preload
from generator.orphan import announce_parent

announce_parent()
set_forkserver_preload(["preloaded"])
forkserver.ensure_running()
print(forkserver._forkserver._forkserver_pid, flush=True)
time.sleep(600)
"""
SLOW = """
import sys, time

print("importing", flush=True)
time.sleep(600)
"""
QUICK = """
import threading
from generator.prestart import import_ahead

import_ahead(["colorsys"])
print(sorted(thread.name for thread in threading.enumerate()), flush=True)
"""


def started(folder: Path, preloaded: str) -> tuple[subprocess.Popen[str], psutil.Process, str]:
    """A process as an engine is one, and its fork server, which imports a module ``preloaded`` of this source.

    And the first line that the module prints.
    """
    (folder / "slow.py").write_text(SLOW)
    (folder / "preloaded.py").write_text(preloaded)
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert engine.stdout is not None
    lines = [engine.stdout.readline() for _ in range(2)]  # of two processes, in either order
    (number,) = [line for line in lines if line.strip().isdigit()]
    lines.remove(number)
    return engine, psutil.Process(int(number)), lines[0]


def test_a_fork_server_that_is_still_importing_ends_when_its_engine_is_killed(tmp_path):
    engine, server, said = started(tmp_path, "from generator.prestart import import_ahead; import_ahead(['slow'])")
    try:
        assert said == "importing\n"
        engine.kill()
        server.wait(timeout=120)  # the import would take ten minutes
    finally:
        engine.kill()
        engine.wait()
        if server.is_running():
            server.kill()


def test_a_fork_server_has_no_thread_of_ours_left_when_it_begins_to_fork(tmp_path):
    engine, server, said = started(tmp_path, QUICK)
    try:
        assert said == "['MainThread']\n"
    finally:
        engine.kill()
        engine.wait()
        server.wait(timeout=120)
