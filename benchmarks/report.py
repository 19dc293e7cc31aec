"""What every program of measurements says of the machine, prints and writes."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path
from typing import Any

import psutil

GIB = 1 << 30


def machine() -> str:
    """The machine in one phrase."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (match := re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())):
        model = match[1]
    memory = psutil.virtual_memory().total / GIB
    return f"{model}, {psutil.cpu_count()} cores, {memory:.0f} GiB"


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as a Markdown table."""
    columns = list(rows[0])
    cells = [[f"{row[c]:.3g}" if isinstance(row[c], float) else str(row[c]) for c in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in [columns, ["---"] * len(columns), *cells])


def figures(report: dict[str, Any]) -> str:
    """The figures, a line each."""
    return "\n".join(f"{name}: {value}" for name, value in report.items())


def write_json(path: Path | None, report: dict[str, Any]) -> None:
    """Write the figures where ``--json`` asks for it."""
    if path is not None:
        path.write_text(json.dumps(report, indent=2) + "\n")


def steps_made(run_dir: Path) -> int:
    """How many steps a run has written."""
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0
