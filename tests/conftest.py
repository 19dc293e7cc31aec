"""Order of the tests: those that start engines come last, so that a broken rule is seen before a minute has passed."""

from __future__ import annotations

import os

import pytest

# As in a run, see trainer/ray_session.py: a thread that outlives the Ray of its test must not start another one.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests marked ``engine`` behind all others; otherwise keep the order."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)
