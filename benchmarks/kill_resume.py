"""Runs that are killed and started again by the same command: is a step, a prompt or a token lost, or made twice?

    python -m benchmarks.kill_resume [--json PATH] [--quick] [--runs N] [--kills N]

Each run is ``ci_tiny`` with a checkpoint after every step and as many steps as make one pass over its data. Its
process is killed (SIGKILL) ``--kills`` times, at random moments: while it starts, in the middle of a step, in the
middle of a checkpoint. After each kill the same command continues it; the last start is left alone. Then is checked
that it made exactly the planned steps, that each prompt was learned from exactly once, and that the totals of
``summary.json`` agree with each other and, token by token, with the rollouts that were written.

The report is written after each run, and a start with the same file goes on behind the last one. The exit code is 1
when anything differs.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.report import machine, steps_made, write_json

STEPS, PROMPTS = 12, 4
"""One pass over the 48 prompts of ci_tiny."""
KILLS_IN_START = 0.2
"""Share of kills within the first ``START_SECONDS`` of a start; the others come after a step picked at random."""
START_SECONDS = 30.0
AFTER_A_STEP = 1.0
"""A kill comes at most so many seconds after its step is written: about as long as a step and a checkpoint take."""
PATIENCE = 900.0
"""Seconds until a start must have made a step, and a run must have ended."""


def command(run_dir: Path) -> list[str]:
    """The command of every start of a run."""
    return [
        sys.executable, "-m", "trainer", "recipe=ci_tiny", f"run_dir={run_dir}", f"steps={STEPS}",
        f"batch.prompts={PROMPTS}", "checkpoint.every=1", "checkpoint.keep=2", "logger.rollouts.every=1",
        "logger.wandb.mode=disabled", "logger.progress=false",
    ]  # fmt: skip


def killed_run(folder: Path, kills: int, dice: random.Random) -> dict[str, Any]:
    """One run to its end, killed ``kills`` times on the way; what is wrong with it, and when it was killed."""
    run_dir, log = folder / "run", folder / "log"
    killed_at: list[int] = []
    while len(killed_at) < kills:
        with log.open("a") as output:
            run = subprocess.Popen(command(run_dir), stdout=output, stderr=subprocess.STDOUT)
        steps = _wait_for_the_moment(run, run_dir, dice)
        if run.poll() is not None:  # it came to its end first
            break
        run.kill()
        run.wait()
        killed_at.append(steps)
    with log.open("a") as output:
        code = subprocess.run(command(run_dir), stdout=output, stderr=subprocess.STDOUT, timeout=PATIENCE).returncode
    if code != 0:
        raise RuntimeError(f"the last start of the run exited with {code}:\n{log.read_text()[-4000:]}")
    return {"killed_after_steps": killed_at, "faults": faults(run_dir)}


def _wait_for_the_moment(run: subprocess.Popen[bytes], run_dir: Path, dice: random.Random) -> int:
    """Return at the moment of the kill, or when the run has ended; the steps done by then."""
    started = time.monotonic()
    if dice.random() < KILLS_IN_START:
        _sleep_beside(run, dice.uniform(0.0, START_SECONDS))
        return steps_made(run_dir)
    step = dice.randint(min(steps_made(run_dir) + 1, STEPS), STEPS)
    while run.poll() is None and steps_made(run_dir) < step:
        if time.monotonic() - started > PATIENCE:
            run.kill()
            raise RuntimeError(f"no {step} steps within {PATIENCE:g} s after a start")
        time.sleep(0.02)
    _sleep_beside(run, dice.uniform(0.0, AFTER_A_STEP))
    return steps_made(run_dir)


def _sleep_beside(run: subprocess.Popen[bytes], seconds: float) -> None:
    until = time.monotonic() + seconds
    while run.poll() is None and time.monotonic() < until:
        time.sleep(0.02)


def faults(run_dir: Path) -> list[str]:
    """What is wrong with a run that has ended, for people."""
    found = []
    summary = json.loads((run_dir / "summary.json").read_text())
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [
        json.loads(line)
        for file in sorted((run_dir / "rollouts").glob("step_*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    if summary["steps"] != STEPS or steps != list(range(1, STEPS + 1)):
        found.append(f"{summary['steps']} steps were made, metrics are of {steps}")
    groups = {(row["prompt_id"], row["rollout_id"].rpartition("-")[0]) for row in rows}
    times = Counter({prompt: 0 for prompt in range(STEPS * PROMPTS)})
    times.update(prompt for prompt, _ in groups)
    if wrong := {prompt: count for prompt, count in times.items() if count != 1}:
        found.append(f"prompts that were not learned from exactly once, and how often they were: {wrong}")
    if len({row["rollout_id"] for row in rows}) != len(rows):
        found.append("a rollout was learned from twice")
    written = sum(sum(row["loss_mask"]) for row in rows)
    if written != summary["tokens/trained"]:
        found.append(f"{written} trained tokens were written, {summary['tokens/trained']} counted")
    accounted = summary["tokens/trained"] + summary["tokens/expired"] + summary["tokens/lost"]
    if summary["tokens/generated"] != accounted:
        found.append(f"{summary['tokens/generated']} tokens were generated, {accounted} accounted for")
    return found


def main() -> int:
    """Kill, continue, check; print the table, write the JSON. How many runs had a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--kills", type=int, default=1, help="kills of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    asked = {"seed": arguments.seed, "kills_of_a_run": arguments.kills}
    runs = _made_before(arguments.json, asked)
    for number in range(len(runs), 1 if arguments.quick else arguments.runs):
        dice = random.Random(f"{arguments.seed}/{number}")
        with tempfile.TemporaryDirectory() as folder:
            runs.append(killed_run(Path(folder), arguments.kills, dice))
        last = runs[-1]
        print(f"run {number}: killed after {last['killed_after_steps']} steps; {last['faults'] or 'exact'}", flush=True)
        write_json(arguments.json, _report(runs) | asked)
    report = _report(runs)
    print(f"{report['kills']} kills of {len(runs)} runs; {len(runs) - report['wrong']} runs exact")
    return int(report["wrong"])


def _made_before(path: Path | None, asked: dict[str, int]) -> list[dict[str, Any]]:
    """The runs of a report with the same seed and kills that was broken off."""
    if path is None or not path.exists():
        return []
    report = json.loads(path.read_text())
    if any(report.get(name) != value for name, value in asked.items()):
        raise SystemExit(f"{path} holds runs of another --seed or --kills; name another file")
    return list(report["runs"])


def _report(runs: list[dict[str, Any]]) -> dict[str, Any]:
    wrong = sum(bool(run["faults"]) for run in runs)
    return {
        "machine": machine(),
        "kills": sum(len(run["killed_after_steps"]) for run in runs),
        "resumed": len(runs),
        "accounting_exact": wrong == 0,
        "wrong": wrong,
        "runs": runs,
    }


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
