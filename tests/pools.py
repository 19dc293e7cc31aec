"""The settings of an engine pool, for tests and benchmarks with simulated engines."""

from __future__ import annotations

from typing import Any

from generator.pool import PoolSettings


def pool_settings_for(count: int, **changes: Any) -> PoolSettings:
    """A pool of ``count`` engines."""
    others: dict[str, Any] = {"max_running": 64, "max_restarts": 10, "serve_timeout": 900.0}
    return PoolSettings(count, **{**others, "mode": "abort", "kv_cache": "recompute", **changes})
