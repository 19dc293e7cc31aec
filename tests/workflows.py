"""The commands of the workflow files, for tests that run them here."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".github" / "workflows"
NIGHTLY_CPU = FOLDER / "nightly-cpu.yml"
PYTHON = "bin/python"
"""How the interpreter of the environment ends that `make setup` makes; here it is the one that runs the tests."""


def job(path: Path) -> dict[str, Any]:
    """The one job of a workflow."""
    (found,) = yaml.safe_load(path.read_text())["jobs"].values()
    return found


def commands(path: Path) -> dict[str, str]:
    """What each named step of a workflow has its shell run."""
    return {step["name"]: step["run"] for step in job(path)["steps"] if "run" in step}


def environment(path: Path, **changes: str) -> dict[str, str]:
    """The environment of a workflow's steps. What GitHub fills in is empty, as on a schedule and without secrets."""
    given = {name: "" if str(value).startswith("${{") else str(value) for name, value in job(path)["env"].items()}
    return {**os.environ, **given, **changes}


def words(path: Path, step: str, **changes: str) -> list[str]:
    """The program that a step comes to, and its arguments.

    ``make`` is asked what it would run: it would first bring the environment up to date, which is not for a test to do.
    """
    command = commands(path)[step]
    made = command.startswith("make ")
    shell = command.replace("make ", "make -n --no-print-directory ", 1) if made else f"printf '%s\\n' {command}"
    done = subprocess.run(
        ["bash", "-e", "-c", shell],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=environment(path, **changes),
    )
    lines = done.stdout.splitlines()
    found = shlex.split(lines[-1].removeprefix("exec ")) if made else lines
    return [sys.executable if found[0].endswith(PYTHON) else found[0], *found[1:]]
