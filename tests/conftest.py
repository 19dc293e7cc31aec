"""What holds for all tests: those that start engines come last, and none fails because the machine is busy."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# As in a run, see trainer/ray_session.py: a thread that outlives the Ray of its test must not start another one.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

# How long an example takes says how busy the machine is, and no test asserts a time.
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests marked ``engine`` behind all others, so that a broken rule is seen before a minute has passed."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)
