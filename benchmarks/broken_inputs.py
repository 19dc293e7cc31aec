"""Broken configurations and data files through the real command: is each answered, by exit code 2 and one line, soon?

    python -m benchmarks.broken_inputs [--configurations 200] [--data-files 40] [--seed 0] [--parallel 2] [--json PATH]

Starts ``python -m trainer`` once an input, ``--parallel`` at a time, in a folder of its own. The inputs are those of
``tests/trainer/broken_inputs.py``: some written by hand, the others made from the schema of the configuration and from
a file that is fine. Exits with 1 when one is not answered as it should be. ``--seconds`` bounds the whole: what was not
started by then is left out, and counted in ``left_out``.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import figures, machine, write_json
from tests.trainer.broken import Broken, chat_model
from tests.trainer.broken_inputs import configurations, data_files

ROOT = Path(__file__).resolve().parents[1]
EXIT_CONFIG = 2
SOON = 10.0
"""Seconds within which there should be an answer."""
DEADLINE = 120.0
"""Seconds after which a command is ended: it hangs, or runs."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the command did with one input."""

    what: str
    exit_code: int | None
    """``None``: ended by this program."""
    traceback: bool
    missing: list[str]
    """What its message should have named and did not."""
    lines: int
    """Of the message."""
    seconds: float
    said: str

    @property
    def right(self) -> bool:
        """Whether people get what they need."""
        return self.exit_code == EXIT_CONFIG and not self.traceback and not self.missing and self.lines == 1


def ask(broken: Broken, model: Path, deadline: float) -> Answer | None:
    """Run the command on one input; ``None`` past ``deadline``, a time of the monotonic clock."""
    started = time.monotonic()
    if started > deadline:
        return None
    with tempfile.TemporaryDirectory() as folder:
        given, names = broken.lay_out(Path(folder), model)
        command = [sys.executable, "-m", "trainer", *given]
        paths = os.pathsep.join([str(ROOT), folder])
        environment = {**os.environ, "PYTHONPATH": paths, "WANDB_MODE": "disabled"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=environment,
            cwd=folder,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=DEADLINE)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            process.terminate()  # a run ends itself, with what it started
            out, err = process.communicate()
            code = None
    seconds = time.monotonic() - started
    missing = [name for name in names if name not in err]
    return Answer(
        broken.what, code, "Traceback" in out + err, missing, len(err.splitlines()), seconds, err.strip()[-500:]
    )


def report(kinds: dict[str, list[Answer | None]]) -> dict[str, Any]:
    """The figures of all answers, by kind of input."""
    answers = [answer for of_kind in kinds.values() for answer in of_kind if answer is not None]
    return {
        **{kind: sum(answer is not None for answer in of_kind) for kind, of_kind in kinds.items()},
        "left_out": sum(answer is None for of_kind in kinds.values() for answer in of_kind),
        "exit_2": sum(answer.exit_code == EXIT_CONFIG for answer in answers),
        "tracebacks": sum(answer.traceback for answer in answers),
        "not_named": sum(bool(answer.missing) for answer in answers),
        "slowest_seconds": max((answer.seconds for answer in answers), default=0.0),
        "median_seconds": sorted(answer.seconds for answer in answers)[len(answers) // 2] if answers else 0.0,
        "slow": [f"{answer.what}: {answer.seconds:.1f} s" for answer in answers if answer.seconds > SOON],
        "wrong": [f"{answer.what}: {answer.exit_code}: {answer.said}" for answer in answers if not answer.right],
    }


def sample(inputs: list[Broken], count: int, seed: int) -> list[Broken]:
    """``count`` of the inputs, of all their kinds."""
    return random.Random(seed).sample(inputs, min(count, len(inputs)))


def main() -> int:
    """Ask, print the figures, write the JSON; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", type=int, default=200)
    parser.add_argument("--data-files", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no further input is started")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    inputs = {
        "configurations": sample(configurations(given.seed), given.configurations, given.seed),
        "data_files": sample(data_files(given.seed), given.data_files, given.seed),
    }
    deadline = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.parallel) as pool:
        model = chat_model(Path(folder))
        asked = {kind: [pool.submit(ask, one, model, deadline) for one in some] for kind, some in inputs.items()}
        outcome = report({kind: [one.result() for one in some] for kind, some in asked.items()})
    print(f"{machine()}\n\n{figures(outcome)}")
    write_json(given.json, {"machine": machine(), **outcome})
    return 1 if outcome["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
