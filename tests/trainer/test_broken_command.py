"""The whole command on a broken input of each stage at which one is found; all others: ``test_broken_inputs.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.broken import chat_model
from tests.trainer.broken_inputs import configurations, data_files

pytestmark = pytest.mark.engine  # processes of the whole command: seconds each even where no engine starts

ROOT = Path(__file__).resolve().parents[2]
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
        [sys.executable, "-m", "trainer", *given, f"run_dir={tmp_path / 'run'}"],
        capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("Configuration error: ")
    assert [name for name in names if name not in line] == [], line
    assert not (tmp_path / "run").exists()
