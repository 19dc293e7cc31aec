"""The tutorial of docs/your-own-task.md, done as it is written there: its files and commands in an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT, TUTORIAL, blocks, commands

PAGE, SECTION = TUTORIAL
BLOCKS = [block for block in blocks(PAGE) if block.section == SECTION]
FILES = {block.title: block.text for block in BLOCKS if block.title}
COMMANDS = [command for block in BLOCKS if block.language == "bash" for command in commands(block)]


def test_the_tutorial_has_data_a_task_a_recipe_and_commands_that_train_and_check():
    assert [Path(name).suffix for name in FILES] == [".jsonl", ".py", ".yaml"]
    assert [command.words[2] for command in COMMANDS] == ["trainer", "trainer.check"]


@pytest.mark.engine
def test_the_tutorial_ends_with_the_reader_s_own_reward_learned(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    environment = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}
    for command in COMMANDS:
        done = subprocess.run(
            [sys.executable, *command.words[1:]],
            capture_output=True, text=True, timeout=900, env=environment, cwd=tmp_path, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    (folder,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["reward/share"] == rows[-1]["reward/mean"] > 2 * rows[0]["reward/mean"]
    assert json.loads((folder / "summary.json").read_text())["status"] == "done"
    for name in ("report.html", "export"):
        assert (folder / name).exists(), f"the page says that there is {name}"
