"""The reward of the tiny recipe, which in the middle of a run kills vLLM's engine core: no test can come too late."""

from __future__ import annotations

import contextlib
import itertools

import psutil

from recipes.ci_tiny import reward

KILLS_AT = 10
"""The call, of which each step has a few."""
_calls = itertools.count(1)


def share_of_a(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """The share of the letter `a`; runs in the process that everything else is below."""
    if next(_calls) == KILLS_AT:
        (core,) = engine_cores(psutil.Process())
        core.kill()
    return reward.share_of_a(prompts, completions, **columns)


def engine_cores(of: psutil.Process) -> list[psutil.Process]:
    """The engine cores below a process."""
    found = []
    for process in of.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if "EngineCore" in " ".join(process.cmdline()):
                found.append(process)
    return found
