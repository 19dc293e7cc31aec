"""``python -m trainer.check RUN_DIR [CONDITION ...]``: did a run do what it should have done?

Conditions compare statistics of metrics with numbers: 'last10("reward/mean") > 0.6', 'max("mismatch/kl") < 0.05',
'last10("reward/mean") >= 2 * first10("reward/mean")', 'summary("status") == "done"'. Without any, those of the run's
recipe are taken (`checks` in its configuration).

Exit codes: 0 all hold, 1 one does not, 2 the folder or a condition cannot be read.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from yaml import YAMLError  # type: ignore[import-untyped]

from trainer.conditions import ConditionError, Verdict, read_conditions
from trainer.watch.read_folder import json_object, read_config, read_rows


class UnreadableError(ValueError):
    """What was given cannot be judged. The message says why; exit code 2."""


def read_run(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """What a run wrote of its steps and then of its evaluations, its summary, and the conditions of its recipe."""
    if not (folder / "metrics.jsonl").is_file():
        raise UnreadableError(f"{folder} is no run folder: it holds no metrics.jsonl")
    rows = []
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        by_step, broken = read_rows(folder / name)
        rows += list(by_step.values())
        if broken:
            sys.stderr.write(f"{folder / name}: {broken} lines cannot be read and are left out (a kill tears one)\n")
    try:
        checks = read_config(folder / "config.yaml").get("checks") or []
    except (YAMLError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{folder / 'config.yaml'}: not YAML: {error}") from None
    summary = folder / "summary.json"
    written = json_object(summary.read_text(encoding="utf-8", errors="replace")) if summary.exists() else {}
    if written is None:
        raise UnreadableError(f"{summary}: not a JSON object")
    # A run that was killed has no summary; conditions about it say so.
    return rows, written, [str(condition) for condition in checks]


def table(verdicts: list[Verdict]) -> str:
    """The verdicts in Markdown, which reads as well in a terminal."""
    rows = [("", "condition", "seen"), *(("pass" if v.passed else "FAIL", v.condition, v.seen) for v in verdicts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head, *body = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return "\n".join([head, "|" + "|".join("-" * (width + 2) for width in widths) + "|", *body])


def _how_it_ended(summary: dict[str, Any]) -> str:
    """Of a run that has not come to its end: a condition that fails may only say so."""
    if (status := summary.get("status")) == "done":
        return ""
    return f" ({status} after {summary.get('steps', 0)} steps)" if status else " (killed, or still going on)"


def main(arguments: list[str] | None = None) -> int:
    """Judge, print the table, return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("conditions", nargs="*", metavar="CONDITION")
    parser.add_argument(
        "--summary", type=Path, default=os.environ.get("GITHUB_STEP_SUMMARY"),
        help="append the table to this Markdown file; default: $GITHUB_STEP_SUMMARY, the page of a GitHub workflow",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    try:
        rows, summary, checks = read_run(given.run_dir)
        conditions = read_conditions(given.conditions or checks)
        if not conditions:
            raise UnreadableError("no condition is given, and the run's recipe has no `checks`")
    except (UnreadableError, ConditionError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    verdicts = [condition.judge(rows, summary) for condition in conditions]
    failed = sum(not verdict.passed for verdict in verdicts)
    title = f"{given.run_dir}{_how_it_ended(summary)}: {len(verdicts) - failed} of {len(verdicts)} conditions hold"
    print(f"{title}\n\n{table(verdicts)}")
    if given.summary:
        try:
            with open(given.summary, "a", encoding="utf-8") as page:
                page.write(f"### {title}\n\n{table(verdicts)}\n\n")
        except OSError as error:  # the verdict stands
            sys.stderr.write(f"the table cannot be appended to {given.summary}: {error.strerror}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
