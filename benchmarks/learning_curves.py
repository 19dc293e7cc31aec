"""Learning curves of every preset of ``configs/algorithm``: one small task, the real stack, several seeds.

    python -m benchmarks.learning_curves [--presets a,b] [--seeds 5] [--steps 40] [--jobs 2] [--folder F] [overrides]

Runs ``python -m trainer recipe=ci_tiny algorithm=PRESET seed=S`` for every preset and seed: a two-layer model from
random weights learns to write the letter `a`. Each run that ends leaves a file in the folder (default:
outputs/learning_curves), and one that is there is not repeated: a start that was broken off goes on where it was. From
the files it then writes the page docs/learning-curves.md and its two pictures; ``--docs`` names another folder for
them, and ``--draw`` only writes the page. All presets with one seed come before the next seed, so that each has as many
whenever it is stopped. Run it on an otherwise idle machine: the second picture shows seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.curves_page import write_page
from benchmarks.report import machine

ROOT = Path(__file__).resolve().parents[1]
PRESETS = tuple(sorted(path.stem for path in (ROOT / "configs" / "algorithm").glob("*.yaml")))
REWARD = "reward/share_of_a"
"""The share of the letter: the task's own reward, without what a preset adds to or takes from it."""
TASK = ("sampling.ignore_eos=true", "optimizer.learning_rate=1e-3")
"""Every response uses its whole budget, so that rollouts of all presets cost the same. The learning rate is a third of
the recipe's, with which ten steps are enough and no curve can be told from another."""
LEAN = (
    "logger.wandb.mode=disabled", "logger.table.every=0", "logger.rollouts.every=0", "logger.progress=false",
    "engine.cpu_threads=1", "learner.cpu_threads=1",
)  # fmt: skip
"""What takes time and changes no reward is left off; more threads would only make a model of this size slower."""
RUN_TIMEOUT = 900.0
"""Seconds after which a run has failed."""


@dataclass(frozen=True)
class Run:
    """What one run left: of each step the mean reward, the rollouts learned from so far, and the seconds so far.

    Seconds count from the moment at which engine and learner were ready. ``start_seconds`` is the time before that,
    and ``wall_seconds`` that of the whole command.
    """

    preset: str
    seed: int
    rewards: list[float]
    rollouts: list[float]
    seconds: list[float]
    start_seconds: float
    wall_seconds: float


def load_runs(folder: Path) -> list[Run]:
    """The runs that a folder holds, by preset and seed."""
    return sorted(
        (Run(**json.loads(path.read_text())) for path in folder.glob("*.seed_*.json")),
        key=lambda run: (run.preset, run.seed),
    )


def run_once(preset: str, seed: int, overrides: list[str], log: Path) -> Run:
    """Train once. Raises ``RuntimeError`` with the end of the output when that fails or does not end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trainer", "recipe=ci_tiny", f"algorithm={preset}", f"seed={seed}",
                   f"run_dir={folder}/run", *overrides]  # fmt: skip
        started = time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
            try:
                code = process.wait(timeout=RUN_TIMEOUT)
            except BaseException as error:
                process.terminate()  # the run ends its own processes
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                code = None
        wall = time.monotonic() - started
        if code != 0:
            what = f"did not end in {RUN_TIMEOUT:g} s" if code is None else f"exited with {code}"
            raise RuntimeError(f"{' '.join(command)} {what}:\n{log.read_text()[-3000:]}")
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
        return from_metrics(preset, seed, rows, wall)


def from_metrics(preset: str, seed: int, rows: list[dict[str, Any]], wall: float) -> Run:
    """A run from the lines of its ``metrics.jsonl``."""
    rollouts = seconds = 0.0
    totals: tuple[list[float], list[float]] = ([], [])
    for row in rows:
        rollouts += row["throughput/rollouts_per_second"] * row["timing/step_seconds"]
        seconds += row["timing/step_seconds"]
        totals[0].append(round(rollouts))
        totals[1].append(round(seconds, 3))
    rewards = [row[REWARD] for row in rows]
    return Run(preset, seed, rewards, *totals, round(wall - seconds, 3), round(wall, 3))


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Say in the folder what its runs are of. Raises ``SystemExit`` where they are of something else."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "settings.json"
    known = json.loads(path.read_text()) if path.exists() else None
    if known is not None and known["overrides"] != settings["overrides"]:
        raise SystemExit(
            f"{folder} holds runs with {' '.join(known['overrides'])}, not with {' '.join(settings['overrides'])}; "
            "give the same values, or another --folder"
        )
    if known is None:
        path.write_text(json.dumps(settings, indent=2) + "\n")


def run_all(folder: Path, jobs: list[tuple[str, int]], overrides: list[str], side_by_side: int) -> list[str]:
    """Make the runs that the folder does not hold; the errors of those that failed."""
    missing = [(preset, seed) for preset, seed in jobs if not (folder / f"{preset}.seed_{seed}.json").exists()]
    errors: list[str] = []
    done = 0
    lock = threading.Lock()

    def make(job: tuple[str, int]) -> None:
        nonlocal done
        preset, seed = job
        name = f"{preset}.seed_{seed}"
        try:
            run = run_once(preset, seed, overrides, folder / f"{name}.log")
        except RuntimeError as error:
            with lock:
                done += 1
                errors.append(str(error))
                print(f"{done:3d}/{len(missing)}  {preset} seed {seed}: failed\n{error}", flush=True)
            return
        temporary = folder / f".{name}.json"
        temporary.write_text(json.dumps(asdict(run)) + "\n")
        os.replace(temporary, folder / f"{name}.json")
        (folder / f"{name}.log").unlink()
        with lock:
            done += 1
            first, last = (statistics.mean(part) for part in (run.rewards[:5], run.rewards[-5:]))
            print(
                f"{done:3d}/{len(missing)}  {preset} seed {seed}: reward {first:.2f} to {last:.2f} "
                f"in {run.wall_seconds:.0f} s, {run.start_seconds:.0f} s of them start and end",
                flush=True,
            )

    with ThreadPoolExecutor(side_by_side) as pool:
        try:
            list(pool.map(make, missing))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return errors


def commit() -> str:
    """The commit that runs, marked where files differ from it; empty outside of a repository."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    return done.stdout.strip()


def main() -> None:
    """Run what is missing, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=",".join(PRESETS), help="names, with commas between them")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "learning_curves")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    parser.add_argument("--draw", action="store_true", help="write the page from the runs that are there")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    presets = arguments.presets.split(",")
    if unknown := sorted(set(presets) - set(PRESETS)):
        raise SystemExit(f"no such preset: {', '.join(unknown)}; there are {', '.join(PRESETS)}")
    overrides = [f"steps={arguments.steps}", *TASK, *arguments.overrides]
    settings = {"overrides": overrides, "machine": machine(), "commit": commit(), "jobs": arguments.jobs}
    errors: list[str] = []
    if not arguments.draw:
        claim(arguments.folder, settings)
        jobs = [(preset, seed) for seed in range(arguments.seeds) for preset in presets]
        errors = run_all(arguments.folder, jobs, [*overrides, *LEAN], arguments.jobs)
    runs = load_runs(arguments.folder)
    if not runs:
        raise SystemExit(f"{arguments.folder} holds no runs")
    path = write_page(arguments.docs, runs, json.loads((arguments.folder / "settings.json").read_text()))
    print(f"{len(runs)} runs, {len(errors)} failed; {path}")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
