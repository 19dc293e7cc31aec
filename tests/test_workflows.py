"""The workflow files run commands that exist, with keys that exist."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from trainer.compose import compose_config
from trainer.conditions import read_conditions

WORKFLOWS = sorted((Path(__file__).resolve().parents[1] / ".github" / "workflows").glob("*.yml"))


def commands(path: Path) -> list[list[str]]:
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    return [shlex.split(step["run"]) for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_trains_a_recipe_that_exists_and_checks_its_run(path):
    (_, train, check) = commands(path)
    words = dict(word.split("=", 1) for word in train[2:])
    hardware = "gpu" if "gpu" in path.name else "cpu"
    config = compose_config([f"recipe={words['RECIPE']}", f"hardware={hardware}", *shlex.split(words["ARGS"])])
    assert check[:3] == [".venv/bin/python", "-m", "trainer.check"]
    assert check[3] == config.run_dir
    assert check[4:] == []
    assert read_conditions(list(config.checks)), "the thresholds stand beside the recipe"


def test_there_is_one_for_a_plain_runner_and_one_for_gpus():
    assert [path.name for path in WORKFLOWS] == ["nightly-cpu.yml", "nightly-gpu.yml"]
    assert all(re.search(r"cron: ", path.read_text()) for path in WORKFLOWS)
