"""How many bytes a sparse push sends, of those of a dense one, over real training steps of the embedded recipe.

    python -m benchmarks.push_delta [--steps 4] [--json PATH] [overrides ...]

A run of ``gsm8k_fully_async`` in bfloat16 with float32 master weights and a learning rate of 1e-6, with
``weight_sync.delta=true``. Its first push is dense; what the later ones sent is in its metrics.
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

from benchmarks.report import figures, machine, write_json

RUN_SECONDS = 1150.0
"""A processor without bfloat16 units takes minutes a step."""


def run(recipe: str, steps: int, overrides: list[str]) -> dict[str, Any]:
    """Train ``steps`` steps."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [
            sys.executable, "-m", "trainer", f"recipe={recipe}", f"run_dir={run_dir}", f"steps={steps}",
            "hardware=cpu", "model.dtype=bfloat16", "optimizer.learning_rate=1e-6", "optimizer.warmup_steps=0",
            "weight_sync.delta=true", "logger.wandb.mode=disabled", *overrides,
        ]  # fmt: skip
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_SECONDS, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout[-4000:]}")
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    # The first step's figures have the dense push before it in them.
    ratios = [row["push/bytes"] / row["push/dense_bytes"] for row in rows[1:]]
    return {"delta_bytes_ratio": statistics.median(ratios), "largest": max(ratios), "ratios": ratios}


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny recipe")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    recipe = "ci_tiny" if arguments.quick else "gsm8k_fully_async"
    report = run(recipe, arguments.steps, arguments.overrides)
    print(machine())
    print(figures(report))
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()
