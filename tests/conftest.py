"""Order of the tests: those that start engines come last, so that a broken rule is seen before a minute has passed."""

from __future__ import annotations

import os

import pytest

# As in a run, see trainer/ray_session.py: a thread that outlives the Ray of its test must not start another one.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"


SHARED_ENGINE = "the engine of tests/weight_sync/conftest.py"


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests marked ``engine`` behind all others; otherwise keep the order.

    Tests of one file, or of one shared engine, go to one worker of pytest-xdist: what they share is started once.
    """
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)
    for item in items:
        shares_engine = "weight_sync" in item.path.parts and "engine" in getattr(item, "fixturenames", ())
        own_engine = "engine" in vars(getattr(item, "module", None) or object)
        group = SHARED_ENGINE if shares_engine and not own_engine else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
