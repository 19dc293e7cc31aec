"""An engine for evaluations alone: a pool of its own, and pushes of its own, of the versions that are evaluated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from generator.pool import EnginePool
from weight_sync.push import Pusher
from weight_sync.verification import Verification

if TYPE_CHECKING:
    from generator.link import EngineLink
    from generator.pool import PoolSettings
    from trainer.learner_group import LearnerGroup
    from weight_sync.manifest import Manifest

TRAINING, EVALUATION = "training", "evaluation"
"""The engine pools of a run. The learner keeps a transfer group for each."""


@dataclass(frozen=True, slots=True)
class LearnerOfPool:
    """The learner as the pusher of one engine pool sees it."""

    learner: LearnerGroup
    pool: str

    async def prepare(self, base: int | None = None) -> Manifest:
        """Check the weights; what the engines will hold."""
        return await self.learner.prepare(base, self.pool)

    async def send(self, version: int, hashed: bool = False) -> int:
        """Move the weights into the engines of the pool."""
        return await self.learner.send(version, hashed, self.pool)

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of every token but the first."""
        return await self.learner.logprobs(sequences)

    async def base_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """The same with the adapters off."""
        return await self.learner.base_logprobs(sequences)


def evaluation_pool(make: Callable[[int], EngineLink], settings: PoolSettings) -> EnginePool:
    """A pool of one engine. Whatever a push meets there is given up: nothing of an older version is wanted any more."""
    return EnginePool(make, replace(settings, count=1, mode="abort"))


def evaluation_pusher(
    learner: LearnerGroup,
    engines: EnginePool,
    connect: Callable[[], Awaitable[None]],
    timeout: float,
    verification: Verification,
) -> Pusher:
    """Brings a version to the evaluation engine, always all of it: the versions there are far apart."""
    return Pusher(LearnerOfPool(learner, EVALUATION), engines, timeout, connect=connect, verification=verification)
