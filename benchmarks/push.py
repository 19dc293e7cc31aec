"""A weight push against its limits: the wire, vLLM's own reload, a bucket of memory, and the memory of pushes before.

    python -m benchmarks.push [--json PATH] [--only transfer,push,stall,delta,zero3,memory] [--quick]

Each measurement is a program of its own (``benchmarks.push_engine``, ``push_zero3``, ``push_memory``, ``push_delta``)
and runs here in a process group that is ended after 20 minutes, and after an hour for all of them together. Run it
on an otherwise idle machine.

| key | what | against | aim |
|---|---|---|---|
| ``transfer_ratio`` | bytes a second of packed buckets | one raw broadcast of the same bytes | at least 0.8 |
| ``push_ratio`` | abort to first new token | that transfer plus vLLM's own reload | at most 1.15 |
| ``staged_stall_ratio`` | gap in the token stream, push staged | the same push unstaged | at most 0.7 |
| ``delta_bytes_ratio`` | bytes of a sparse push | dense | at most 0.05 |
| ``zero3_buckets`` | learner memory of a ZeRO-3 push | largest bucket | at most 3 |
| ``memory_growth`` | memory after 500 pushes | after 50 | at most 1.02 |

Of two models, SmolLM2-135M and a random one of 500 million parameters, the key holds the worse figure; ``modes`` holds
the ratio of the whole push and the stall in seconds for ``abort``, ``keep`` and ``wait``. ``None``: not measured.
``--quick`` takes a tiny model, whose figures say nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.push_models import NAMES, TINY
from benchmarks.report import machine, write_json

PART_SECONDS, TOTAL_SECONDS = 1200.0, 3600.0
ENGINE_PARTS = ("transfer", "push", "stall")
PARTS = (*ENGINE_PARTS, "delta", "zero3", "memory")
LOWEST_IS_WORST = ("transfer_ratio",)
KEYS = ("transfer_ratio", "push_ratio", "staged_stall_ratio", "delta_bytes_ratio", "zero3_buckets", "memory_growth")
QUICK_BUCKET = "50"
"""KiB of a bucket of the tiny model, which then still travels in several."""


def commands(parts: list[str], quick: bool, dtype: str, repeat: int) -> dict[str, list[str]]:
    """The programs to run, by name, each with its arguments."""
    small = ["--bucket-kib", QUICK_BUCKET] if quick else []
    found: dict[str, list[str]] = {}
    if wanted := [part for part in ENGINE_PARTS if part in parts]:
        for model in [TINY] if quick else NAMES:
            options = ["--measure", *wanted, "--dtype", dtype, "--repeat", str(1 if quick else repeat), *small]
            found[f"engine {model}"] = ["benchmarks.push_engine", model, *options]
    if "delta" in parts:
        found["delta"] = ["benchmarks.push_delta", *(["--quick"] if quick else [])]
    if "zero3" in parts:
        found["zero3"] = ["benchmarks.push_zero3", TINY if quick else NAMES[0], "--dtype", dtype, *small]
    if "memory" in parts:
        found["memory"] = ["benchmarks.push_memory", *(["--pushes", "40", "--settled", "20"] if quick else [])]
    return found


def run(command: list[str], seconds: float) -> dict[str, Any]:
    """Run one program to its end, output passed on; its report. ``error`` is in it instead if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        process = subprocess.Popen(
            [sys.executable, "-m", *command, "--json", str(path)], start_new_session=True, stdin=subprocess.DEVNULL
        )
        try:
            code = process.wait(seconds)
            if code or not path.exists():
                return {"error": f"{command[0]} exited with {code} and left {'a' if path.exists() else 'no'} report"}
            report: dict[str, Any] = json.loads(path.read_text())
            return report
        except subprocess.TimeoutExpired:
            return {"error": f"{command[0]} did not end within {seconds:g} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def summary(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures by key, the worse one where there are two."""
    engines = [report for name, report in reports.items() if name.startswith("engine")]
    found = {
        "transfer_ratio": [report.get("transfer_ratio") for report in engines],
        "push_ratio": [report.get("push_ratio abort") for report in engines],
        "staged_stall_ratio": [report.get("staged_stall_ratio") for report in engines],
    }
    for key in KEYS[3:]:
        found[key] = [report.get(key) for report in reports.values()]
    return {key: _worst(values, min if key in LOWEST_IS_WORST else max) for key, values in found.items()}


def _worst(values: Iterable[float | None], choose: Any) -> float | None:
    there = [value for value in values if value is not None]
    return choose(there) if there else None


def by_mode(reports: dict[str, dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """By model and mode: the ratio of the whole push, and the median stall in seconds."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for report in reports.values():
        for mode in ("abort", "keep", "wait"):
            row = {}
            if f"push_ratio {mode}" in report:
                row["push_ratio"] = report[f"push_ratio {mode}"]
            if stalls := report.get("seconds", {}).get(f"stall {mode}"):
                row["stall_seconds"] = statistics.median(stalls)
            if row:
                found.setdefault(report["model"], {})[mode] = row
    return found


def main() -> int:
    """Run every part, print the figures, write the JSON. 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one turn")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeat", type=int, default=5, help="turns of the measurements with an engine")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    parts = arguments.only.split(",") if arguments.only else list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the part that runs would be left behind
    reports: dict[str, dict[str, Any]] = {}
    started = time.monotonic()
    for name, command in commands(parts, arguments.quick, arguments.dtype, arguments.repeat).items():
        print(f"\n== {name}", flush=True)
        left = TOTAL_SECONDS - (time.monotonic() - started)
        reports[name] = run(command, min(PART_SECONDS, max(0.0, left)))
        result = {"machine": machine(), **summary(reports), "modes": by_mode(reports), "parts": reports}
        write_json(arguments.json, result)  # after every part: what is measured is kept, whatever the next one does
    print(f"\n{machine()}\n")
    for key, value in summary(reports).items():
        print(f"| {key} | {value if value is None else f'{value:.3f}'} |")
    print(json.dumps(by_mode(reports), indent=2))
    failed = [report["error"] for report in reports.values() if "error" in report]
    print("\n".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
