"""A pool with simulated engines in virtual time, and what must be true of whatever it returns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from generator import virtual_time
from generator.pool import EnginePool, PoolSettings
from generator.resume import Sampling
from generator.rollout import Rollout
from generator.simulated import SimulatedEngine
from generator.simulated_stream import SimulatedSettings, whole_stream
from tests.pools import pool_settings_for
from weight_sync.push import Pusher, PushReport
from weight_sync.simulated import SimulatedSender
from weight_sync.verification import Verification

SAMPLING = Sampling(max_tokens=64, min_tokens=2, stop_token_ids=frozenset(range(20)))
ENGINE = SimulatedSettings(SAMPLING, max_running=4, token_seconds=1.0, start_seconds=30.0, latency=0.1)
FOREVER = 50_000.0
"""Seconds after which a test is stuck: the health watch keeps virtual time going."""


@dataclass
class World:
    """A pool of simulated engines, a learner that has only versions, and the pushes between them."""

    engine: SimulatedSettings = ENGINE
    pool_settings: PoolSettings = field(default_factory=lambda: pool_settings_for(2, max_running=4))
    engines: list[SimulatedEngine] = field(default_factory=list)
    """Every engine there ever was, by number."""
    refuse_from: int = 1_000_000
    """Engines from this number on do not start."""
    verification: Verification = field(default_factory=Verification)
    staged: bool = False
    """Whether weights travel while engines serve."""
    equipping: bool = True
    """Whether engines that join get the published version at once, as they do in a run."""

    def __post_init__(self) -> None:
        self.pool = EnginePool(self._make, self.pool_settings)
        self.sender = SimulatedSender(seconds=1.0, staging=self.staged)
        drain = 1_000.0 if self.pool_settings.mode == "wait" else 0.0
        self.pusher = Pusher(
            self.sender,
            self.pool,
            timeout=60.0,
            connect=self._connect,
            drain_timeout=drain,
            verification=self.verification,
            staged=self.staged,
        )
        self.weights = asyncio.Lock()

    def _make(self, number: int) -> SimulatedEngine:
        engine = SimulatedEngine(f"engine {number}", self.engine, refuse_start=number >= self.refuse_from)
        self.engines.append(engine)
        return engine

    async def _connect(self) -> None:
        self.sender.connect([link.handle for link in await self.pool.take_members()])

    async def push(self, version: int) -> PushReport:
        async with self.weights:
            return await self.pusher.push(version)

    async def equip(self) -> None:
        while True:
            await self.pool.joined.wait()
            async with self.weights:
                if self.pool.joined.is_set():
                    await self.pusher.push(self.pool.version)

    def generate(self, count: int, name: str = "r") -> asyncio.Task[list[Rollout]]:
        return asyncio.create_task(self.pool.generate(prompts(count, name)))


def prompts(count: int, name: str = "r") -> list[Rollout]:
    return [Rollout(f"{name}-{number}", (1, 2, 3)) for number in range(count)]


def run(test: Callable[[World], Awaitable[None]], **options: Any) -> None:
    """Run ``test`` with a pool that serves version 0."""

    async def program() -> None:
        world = World(**options)
        async with asyncio.timeout(FOREVER):
            await world.pool.start()
            await world.push(0)
            equipping = asyncio.create_task(world.equip()) if world.equipping else None
            try:
                await test(world)
                assert not (equipping and equipping.done()), "engines that joined could not be equipped"
            finally:
                if equipping:
                    equipping.cancel()
                await world.pool.shutdown()
        assert all(engine.called["shutdown"] or engine._ended.is_set() for engine in world.engines)

    virtual_time.run(program())


def check(rollouts: list[Rollout], published: int = 1_000_000) -> None:
    """Every rollout is what an engine that nothing happens to would have sampled."""
    for rollout in rollouts:
        expected = whole_stream(ENGINE, SAMPLING, Rollout(rollout.id, (1, 2, 3)))
        assert list(zip(rollout.response_token_ids, rollout.logprobs, strict=True)) == expected
        assert rollout.finish_reason == ("stop" if expected[-1][0] in SAMPLING.stop_token_ids else "length")
        assert all(rollout.loss_mask)
        assert 0 <= min(rollout.versions) <= max(rollout.versions) <= published
