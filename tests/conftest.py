"""Order of the tests: those that start engines come last, so that a broken rule is seen before a minute has passed."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests marked ``engine`` behind all others; otherwise keep the order."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)
