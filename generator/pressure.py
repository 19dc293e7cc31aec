"""How full an engine's KV cache is, and which requests had to give up their blocks, as vLLM tells of each iteration.

A request is preempted when the cache has no block left for the next token of another: it loses its cache and is
computed again later, from its prompt on. Pure; :mod:`generator.launch` registers the gauge with vLLM where one is
wanted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Pressure:
    """Of one engine, or of several together, since the last look."""

    kv_cache_usage: float = 0.0
    """The largest share of its KV-cache blocks that an engine used."""
    preemptions: int = 0
    """Requests that were preempted."""


class PressureGauge:
    """Remembers what an engine reports until somebody looks.

    Has the methods of ``vllm.v1.metrics.loggers.StatLoggerBase``; vLLM calls them in the engine's own event loop.
    """

    def __init__(self) -> None:
        self._usage = 0.0
        self._latest = 0.0
        self._preemptions = 0

    def take(self) -> Pressure:
        """What was reported since the last call; the usage of that moment where nothing was."""
        pressure = Pressure(self._usage, self._preemptions)
        self._usage, self._preemptions = self._latest, 0
        return pressure

    def record(self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **more: Any) -> None:
        """One iteration of the engine; either argument may be ``None``."""
        if scheduler_stats is not None:
            self._latest = scheduler_stats.kv_cache_usage
            self._usage = max(self._usage, self._latest)
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs

    def log(self) -> None:
        """Nothing is printed."""

    def log_engine_initialized(self) -> None:
        """Nothing is printed."""

    def record_sleep_state(self, *arguments: Any) -> None:
        """An engine never sleeps here."""


def together(pressures: Iterable[Pressure]) -> Pressure:
    """The worst cache and all preemptions."""
    seen = list(pressures)
    return Pressure(max((one.kv_cache_usage for one in seen), default=0.0), sum(one.preemptions for one in seen))
