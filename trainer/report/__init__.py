"""One HTML page about one run, or several side by side: ``python -m trainer.report RUN_DIR... [--output FILE]``.

``read`` takes in a run folder whatever is missing from it, ``series``, ``timeline`` and ``rollouts`` choose and thin
what is shown, ``page`` puts it into one file that needs nothing else. Nothing here touches a run that is going on.
"""

from __future__ import annotations

from trainer.report.page import NAME, write_report
from trainer.report.read import ReportError

__all__ = ["NAME", "ReportError", "write_report"]
