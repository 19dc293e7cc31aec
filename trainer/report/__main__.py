"""The command line of the report. Exit codes: 0 written, 2 not a run folder or the page cannot be written."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainer.report import ReportError, write_report


def main(arguments: list[str] | None = None) -> int:
    """Write the page that the command line asks for, print where it is, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.report",
        description="Write one HTML page about one run, or about several side by side. It needs no network.",
    )
    parser.add_argument("run_dir", nargs="+", type=Path, help="run folders, one or several")
    parser.add_argument("--output", type=Path, help="the file to write; default: report.html in the run folder, and "
                        "comparison.html in the first one when there are several")  # fmt: skip
    given = parser.parse_args(arguments)
    try:
        path = write_report(given.run_dir, given.output)
    except ReportError as error:
        sys.stderr.write(f"Report error: {error}\n")
        return 2
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
