"""How many groups are in flight, fitted to the engines' KV caches: additive increase, multiplicative decrease.

More requests make an engine faster until its KV cache is full. Past that it preempts some of them and computes them
again later, which costs more than it brings. How many fit depends on how long the responses are, and so changes while a
model learns; nobody can know it before.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from generator.pressure import Pressure
    from trainer.loop import Parts

DECREASE = 0.8
"""The bound is cut to this share of what is in flight when engines preempt."""
STEPS_UP = 20
"""So many increases lead from nothing to the largest bound."""
ROOM = 0.9
"""Up to this usage of the fullest KV cache there is room for more."""
LOOK_SECONDS = 2.0
"""Between two looks at the engines."""


@dataclass(slots=True)
class Concurrency:
    """The bound on groups in flight. Pure: a look goes in, the new bound comes out."""

    most: int
    """The largest bound, and the first."""
    bound: int = 0
    _running: int = 0
    """In flight at the last look."""

    def __post_init__(self) -> None:
        self.bound = self.bound or self.most

    def resize(self, most: int) -> int:
        """There are more engines now, or fewer: ``most`` is the largest bound from now on. The bound, scaled alike."""
        self.bound = max(1, self.bound * most // self.most)
        self.most = most
        return self.bound

    def look(self, pressure: Pressure, running: int) -> int:
        """The bound after a look at the engines, with ``running`` groups in flight.

        Lower after preemptions, but not while there is more in flight than the bound: the last cut is still to show.
        Higher where the bound is what keeps groups out and the caches have room. Else as it was. At least 1.
        """
        most_running, self._running = max(running, self._running), running
        if pressure.preemptions:
            if running <= self.bound:
                self.bound = max(1, int(DECREASE * min(self.bound, most_running)))
        elif running >= self.bound and pressure.kv_cache_usage < ROOM:
            self.bound = min(self.most, self.bound + max(1, self.most // STEPS_UP))
        return self.bound


async def adapt_concurrency(parts: Parts) -> None:
    """For as long as the run lasts: look at the engines and set how many groups may be in flight.

    Does nothing unless ``staleness.adapt_running_groups`` asks for it.
    """
    if not parts.config.staleness.adapt_running_groups:
        return
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        pressure = await parts.engines.pressure()
        before = parts.admission.max_running
        parts.admission.max_running = parts.concurrency.look(pressure, parts.admission.running)
        parts.kv_cache_usage = max(parts.kv_cache_usage, pressure.kv_cache_usage)
        if parts.admission.max_running > before:
            parts.place_freed.set()
