"""The default run as a person sees it: seconds to the first optimizer step, reward reached, peak memory.

    python -m benchmarks.default_run [--seeds 0 1 2] [--json PATH] [--quick] [overrides ...]

Starts ``python -m trainer recipe=gsm8k_fully_async`` once a seed, one after another, and watches it from outside: the
clock starts with the process, memory is the proportional set size (shared pages counted once) of the process and all
its descendants, sampled once a second. ``--quick`` takes three steps of ``ci_tiny``. Run it on an otherwise idle
machine; overrides are passed on, for example ``steps=20``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import GIB, machine, table, write_json


class MemoryPeak(threading.Thread):
    """The largest sum of memory of a process and its descendants, in bytes, sampled every few seconds.

    Not more often: a sample takes a fifth of a second of CPU time, which the run then lacks.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self._process = process
        self._known: dict[int, psutil.Process] = {}
        self.peak = 0

    def run(self) -> None:
        root = psutil.Process(self._process.pid)
        while self._process.poll() is None:
            try:
                # Ray's daemons detach from their parent, but stay in the session.
                for process in [root, *root.children(recursive=True)]:
                    self._known.setdefault(process.pid, process)
            except psutil.Error:
                break
            self.peak = max(self.peak, sum(self._memory(pid) for pid in list(self._known)))
            time.sleep(5.0)

    def _memory(self, pid: int) -> int:
        try:
            return self._known[pid].memory_full_info().pss
        except psutil.Error:
            del self._known[pid]
            return 0


def measure(recipe: str, seed: int, overrides: list[str], folder: Path) -> dict[str, Any]:
    """Run once; the figures of the run. Raises ``RuntimeError`` with the output when the run fails."""
    command = [sys.executable, "-m", "trainer", f"recipe={recipe}", f"seed={seed}", f"run_dir={folder}", *overrides]
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    memory = MemoryPeak(process)
    memory.start()
    first_step: float | None = None
    output = []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            output.append(line)
            if first_step is None and re.match(r"step +1/", line):
                first_step = time.monotonic() - started
        code = process.wait()
    finally:
        if process.poll() is None:  # this program was interrupted: so is the run, which cleans up by itself
            process.terminate()
            process.wait()
    wall = time.monotonic() - started
    if code != 0:
        raise RuntimeError(f"{' '.join(command)} exited with {code}:\n{''.join(output)}")
    summary = json.loads((folder / "summary.json").read_text())
    first, last = summary["reward/first10_mean"], summary["reward/last10_mean"]
    return {
        "seed": seed,
        "steps": summary["steps"],
        "first_step_seconds": first_step,
        "wall_seconds": wall,
        "reward/first10_mean": first,
        "reward/last10_mean": last,
        "reward_ratio": last / first if first else None,
        "peak_memory_gib": memory.peak / GIB,
        "push/pause_seconds_mean": summary["push/pause_seconds_mean"],
        "rollouts/resumed": summary["rollouts/resumed"],
        "tokens/lost": summary["tokens/lost"],
    }


def main() -> None:
    """Run every seed, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="one seed, three steps of ci_tiny")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    recipe = "ci_tiny" if arguments.quick else "gsm8k_fully_async"
    seeds = arguments.seeds[:1] if arguments.quick else arguments.seeds
    overrides = [*(["steps=3"] if arguments.quick else []), "logger.wandb.mode=offline", *arguments.overrides]
    rows = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(recipe, seed, overrides, Path(folder) / "run"))
        print(table(rows[-1:]), flush=True)
    print(f"\n{machine()}; recipe {recipe}\n\n{table(rows)}")
    write_json(arguments.json, {"machine": machine(), "recipe": recipe, "runs": rows})


if __name__ == "__main__":
    main()
