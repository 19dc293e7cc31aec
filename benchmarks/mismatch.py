"""How far an engine's log-probabilities lie from the learner's right after a push, in runs of the whole stack.

    python -m benchmarks.mismatch [--json PATH] [--quick]

Three on-policy steps each, so that every token was sampled from the weights that the learner has: the tiny model in
float32, SmolLM2 in float32 and in bfloat16; --quick: the tiny model alone. ``mean`` and ``max`` are those of all steps.
A processor without bfloat16 units computes in it several times slower than in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import machine, table, write_json

RUNS = (("ci_tiny", "float32"), ("gsm8k_fully_async", "float32"), ("gsm8k_fully_async", "bfloat16"))
"""Recipe, which names the model, and ``model.dtype``."""
RUN_TIMEOUT = 2400.0
"""Seconds after which a run has failed. In emulated bfloat16 a step takes up to six minutes."""


def measure(recipe: str, dtype: str) -> dict[str, Any]:
    """Mean and largest absolute difference of a run, in nats a token. Raises ``CalledProcessError`` when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trainer", f"recipe={recipe}", f"model.dtype={dtype}", "hardware=cpu",
                   "steps=3", "staleness.max_versions=0", "batch.prompts=8", "logger.wandb.mode=disabled",
                   f"run_dir={folder}/run"]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=RUN_TIMEOUT)
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    compared = [row for row in rows if "mismatch/logprob_abs_diff_mean" in row]
    if not compared:  # rewards that differ nowhere leave nothing to compute
        raise RuntimeError(f"no step of {' '.join(command)} had anything to learn from, so nothing was compared")
    return {
        "recipe": recipe,
        "dtype": dtype,
        "steps": len(compared),
        "mean": statistics.mean(row["mismatch/logprob_abs_diff_mean"] for row in compared),
        "max": max(row["mismatch/logprob_abs_diff_max"] for row in compared),
    }


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny model alone")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [measure(*run) for run in (RUNS[:1] if arguments.quick else RUNS)]
    print(f"{machine()}\n\n{table(rows)}")
    write_json(arguments.json, {"machine": machine(), "runs": rows})


if __name__ == "__main__":
    main()
