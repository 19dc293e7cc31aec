"""The workflow files run commands that exist, with keys that exist; what needs no engine is run here.

That the training command trains is in ``tests/trainer/test_command.py``, whose run is made by it.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml

from tests.trainer.report.folders import write_run
from tests.workflows import FOLDER, NIGHTLY_CPU, ROOT, commands, environment, words
from trainer.checks import check
from trainer.compose import compose_config
from trainer.conditions import read_conditions

WORKFLOWS = sorted(FOLDER.glob("*.yml"))


@pytest.fixture
def run(tmp_path):
    """A run of the recipe of a workflow, with conditions of which one does not hold."""
    folder = write_run(tmp_path / "run", steps=4)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["checks"] = ['summary("status") == "done"', 'max("mismatch/kl") < 0.01']
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_trains_a_recipe_that_exists_with_keys_that_exist(path):
    program, module_flag, module, *overrides = words(path, "Train")
    assert (program, module_flag, module) == (sys.executable, "-m", "trainer")
    hardware = "gpu" if "gpu" in path.name else "cpu"
    config = compose_config([*overrides, f"hardware={hardware}"])
    check(config)
    assert config.run_dir == environment(path)["RUN_DIR"]
    assert config.logger.wandb.tags == ["nightly"]
    assert read_conditions(list(config.checks)), "the thresholds stand beside the recipe"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_run_by_hand_can_be_shorter_or_of_another_recipe(path):
    overrides = words(path, "Train", RECIPE="ci_tiny", RUN_DIR="elsewhere", OVERRIDES="steps=2 seed=3")[3:]
    config = compose_config([*overrides, "hardware=cpu"])
    assert (config.name, config.run_dir, config.steps, config.seed) == ("ci_tiny", "elsewhere", 2, 3)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_the_other_steps_are_about_the_run_that_was_trained(path):
    assert list(commands(path)) == ["Install", "Train", "Check", "Report"]
    assert words(path, "Install")[-1] == "scripts/setup"
    run_dir = environment(path)["RUN_DIR"]
    for step, module in (("Check", "trainer.check"), ("Report", "trainer.report")):
        assert words(path, step) == [sys.executable, "-m", module, run_dir]


def test_the_check_of_the_nightly_run_ends_as_it_found_and_puts_its_table_on_the_page_of_the_workflow(run, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n")
    changes = {"RUN_DIR": str(run), "GITHUB_STEP_SUMMARY": str(page)}
    done = subprocess.run(words(NIGHTLY_CPU, "Check", **changes), capture_output=True, text=True, check=False,
                          cwd=ROOT, env=environment(NIGHTLY_CPU, **changes))  # fmt: skip
    assert done.returncode == 1, done.stderr
    written = page.read_text()
    assert written.startswith(f"before\n### {run}: 1 of 2 conditions hold\n")
    assert re.search(r'^\| pass \| summary\("status"\) == "done" +\| done', written, flags=re.MULTILINE)
    assert re.search(r'^\| FAIL \| max\("mismatch/kl"\) < 0\.01', written, flags=re.MULTILINE)


def test_the_report_of_a_nightly_run_that_was_killed_is_written_afterwards(run):
    (run / "summary.json").unlink()
    done = subprocess.run(words(NIGHTLY_CPU, "Report", RUN_DIR=str(run)), capture_output=True, text=True, check=False,
                          cwd=ROOT, env=environment(NIGHTLY_CPU, RUN_DIR=str(run)))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (run / "report.html").is_file()


def test_there_is_one_for_a_plain_runner_and_one_for_gpus():
    assert [path.name for path in WORKFLOWS] == ["nightly-cpu.yml", "nightly-gpu.yml"]
    assert all(re.search(r"cron: ", path.read_text()) for path in WORKFLOWS)
