"""What an engine is to the rest of the program: its methods, what it returns, and how it fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from generator.pressure import Pressure
from generator.resume import Sampling
from generator.rollout import Rollout

if TYPE_CHECKING:
    from weight_sync.manifest import Manifest

PushMode = Literal["abort", "keep", "wait"]
"""What a push does with running requests: abort them and submit them again, freeze them, or let them end first."""
KvCache = Literal["recompute", "reuse"]
"""What mode ``keep`` does with the KV cache of frozen requests."""


class EngineError(RuntimeError):
    """An engine broke an invariant, or cannot do what it was asked. The message names the engine.

    ``engine`` is its name, where it is known which one it was.
    """

    engine: str | None = None


class EngineLostError(EngineError):
    """An engine died or does not answer. What it was doing can be done by another."""


def root_cause(error: BaseException) -> BaseException:
    """The first error inside groups of errors: the one that a person wants to read."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass(frozen=True, slots=True)
class Returned:
    """What a ``generate`` call brought: every rollout of the call, in order.

    ``reason`` is empty when all of them are finished; else it says why the unfinished ones were handed back:
    ``drained``, ``moved``, or ``lost: ...``. They hold all tokens that were sampled. ``counts`` are metrics of the call
    by name: what its requests met with.
    """

    rollouts: list[Rollout]
    reason: str = ""
    untouched: frozenset[str] = frozenset()
    """Ids of those that were handed back before the engine submitted them even once."""
    counts: Mapping[str, int] = field(default_factory=dict)


class EngineLink(Protocol):
    """One engine as the pool sees it.

    :class:`generator.actor.RayEngine` is the real one, :class:`generator.simulated.SimulatedEngine` has a clock instead
    of a model. Methods raise :class:`EngineLostError` when the engine is gone, :class:`EngineError` for its own errors.
    """

    name: str
    workers: int
    """Processes of the engine that take part in a weight transfer."""
    handle: Any
    """What the learner calls the engine by during a weight transfer."""

    async def start(self) -> None:
        """Load the model; no version is served yet."""
        ...

    async def generate(self, rollouts: list[Rollout], sampling: Sampling | None = None) -> Returned:
        """Sample the rollouts to their end, or hand them back. ``sampling`` is the engine's own unless given."""
        ...

    async def pause(self, mode: PushMode, kv_cache: KvCache) -> int:
        """Close the gate and stop generation; the number of requests that were running or waiting."""
        ...

    async def swap(self, version: int) -> None:
        """While paused: put the staged weights of ``version`` into the model."""
        ...

    async def confirm(self, version: int, manifest: Manifest) -> None:
        """Raise unless ``version`` has arrived completely, as ``manifest`` lists it."""
        ...

    async def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """While the gate is closed: log-probabilities at temperature 1 of every token but the first, under the weights
        that the engine holds. ``None`` where frozen requests would have to run for that.
        """
        ...

    async def resume(self, version: int) -> None:
        """Open the gate; raise unless ``version`` is what the engine holds."""
        ...

    async def drain(self) -> None:
        """Hand everything back and take nothing any more."""
        ...

    async def release(self, count: int) -> int:
        """While paused: hand back about ``count`` rollouts; how many it were."""
        ...

    async def check_health(self) -> None:
        """Raise :class:`EngineLostError` unless the engine is well."""
        ...

    async def partial_rollouts(self) -> list[Rollout]:
        """Every rollout of the calls in flight with the tokens known so far, those that are finished included."""
        ...

    async def pressure(self) -> Pressure:
        """How full its KV cache was since the last call, and how many requests it preempted."""
        ...

    async def shutdown(self) -> None:
        """End the engine within seconds."""
        ...

    def kill(self) -> None:
        """End the engine at once. Calls that wait for its answer must end with :class:`EngineLostError`."""
        ...
