"""The whole command on a broken input of each stage at which one is found; all others: ``test_broken_inputs.py``."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.trainer.broken import chat_model
from tests.trainer.broken_inputs import configurations, data_files
from tests.trainer.command import ROOT, command, ended, environment, no_process_left, run

pytestmark = pytest.mark.engine  # processes of the whole command: seconds each even where no engine starts

STAGES = (
    "a mistyped recipe",  # before Hydra
    "a file with a tab",  # while it composes
    "a file cut in its last line",  # while data is read
    "a reward whose file raises",  # and code imported
    "no room for a prompt",  # with model and tokenizer there
)


@pytest.mark.parametrize("what", STAGES)
def test_bad_input_ends_with_exit_code_2_and_one_readable_line(what, tmp_path):
    (broken,) = [one for one in (*configurations(), *data_files()) if one.what == what]
    (tmp_path / "model").mkdir()
    given, names = broken.lay_out(tmp_path, chat_model(tmp_path / "model"))
    done = subprocess.run(
        command(*given, f"run_dir={tmp_path / 'run'}"),
        capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False,
        env={**environment(), "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("Configuration error: ")
    assert [name for name in names if name not in line] == [], line
    assert not (tmp_path / "run").exists()
    assert no_process_left()


SLOW_START = """
import subprocess, sys, time
from trainer import __main__, leave, ray_session

def start(config):
    subprocess.run(["sleep", "3600"])  # a daemon that this thread waits for

ray_session._start, ray_session.END_SECONDS = start, 3600.0
leave.leave(__main__.main())
"""


LATE = ("recipe=ci_tiny", "hardware=cpu", "engine.max_model_len=25")
"""What is wrong only with the prompts of the data, which are made while Ray starts."""


def test_bad_input_is_answered_before_ray_has_started(tmp_path):
    done = ended([sys.executable, "-c", SLOW_START, *LATE, f"run_dir={tmp_path / 'run'}"], timeout=300)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("Configuration error: ")
    assert no_process_left()


def test_every_job_of_a_sweep_is_answered(tmp_path):
    done = run(*LATE, "--multirun", "seed=1,2", f"run_dir={tmp_path / 'run'}", timeout=300)
    assert done.returncode == 2, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["Configuration error"] * 2
    assert no_process_left()
