"""All engines together: starts them as Ray actors, routes groups to them, and takes part in a push.

Every call to an engine has a deadline; an error of an
engine reaches the caller with its cause. A push costs the driver one call per engine and step, however many rollouts
are in flight.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray

from generator.engine import Engine, EngineError, EngineSettings
from generator.rollout import Rollout

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHUTDOWN_SECONDS = 5.0

MAX_CONCURRENT_CALLS = 100_000
"""Groups an engine actor may hold at once; admission, not the actor, is what bounds concurrency."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What one engine actor reserves in the Ray cluster."""

    cpus: float = 0.0
    gpus: float = 0.0


class EnginePool:
    """Any number of engines behind one interface. Not thread-safe: call it from one event loop."""

    def __init__(
        self, settings: Sequence[EngineSettings], resources: Resources, start_timeout: float, step_timeout: float
    ) -> None:
        self._settings = list(settings)
        self._resources = resources
        self._start_timeout = start_timeout
        self._step_timeout = step_timeout
        self._load = [0] * len(self._settings)
        self.handles: list[Any] = []
        self.version: int | None = None
        """The published version, ``None`` before the first push."""
        self.interrupted = 0
        """Requests that the last push aborted."""

    # -- lifetime ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every engine, side by side. Raises :class:`EngineError` naming the first that did not start."""
        actor = ray.remote(
            num_cpus=self._resources.cpus,
            num_gpus=self._resources.gpus,
            max_concurrency=MAX_CONCURRENT_CALLS,
        )(Engine)
        self.handles = [actor.remote(settings) for settings in self._settings]
        await self._all("start", self._start_timeout)

    async def shutdown(self) -> None:
        """End every engine within ``SHUTDOWN_SECONDS``; what has not ended by then is killed."""
        handles, self.handles = self.handles, []
        waits = [asyncio.wait_for(_ref(handle.shutdown.remote()), SHUTDOWN_SECONDS) for handle in handles]
        for settings, result in zip(self._settings, await asyncio.gather(*waits, return_exceptions=True), strict=False):
            if isinstance(result, BaseException):
                logger.warning("%s did not shut down in order: %r", settings.name, result)
        for handle in handles:
            ray.kill(handle)

    # -- generation -------------------------------------------------------------------------------------------------

    async def generate(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Sample the rollouts of one group to their end on the least loaded engine.

        A group stays together so that its rollouts share the prompt's KV blocks. There is no deadline here: an engine
        fails a rollout that makes no progress for ``engine.rollout_timeout`` seconds, and a dead engine raises.
        """
        index = min(range(len(self.handles)), key=self._load.__getitem__)
        self._load[index] += len(rollouts)
        try:
            return await _named(self._settings[index].name, "generate", self.handles[index].generate.remote(rollouts))
        finally:
            self._load[index] -= len(rollouts)

    async def partial_rollouts(self) -> list[Rollout]:
        """Every rollout in flight with its tokens so far."""
        return [rollout for part in await self._all("partial_rollouts", self._step_timeout) for rollout in part]

    async def stats(self) -> list[dict[str, float]]:
        """One dictionary of counters an engine."""
        return await self._all("stats", self._step_timeout)

    # -- the engines' side of a push (weight_sync.push.Engines) --------------------------------------------------------

    async def close_gate_and_abort(self) -> None:
        """Close every gate and abort what runs; :attr:`interrupted` says how many requests that were."""
        self.interrupted = sum(await self._all("pause", self._step_timeout))

    async def confirm(self, version: int, manifest: Any) -> None:
        """Every engine confirms that it holds ``version``, complete by ``manifest``."""
        entries = tuple((entry.name, entry.dtype, tuple(entry.shape)) for entry in manifest.entries)
        await self._all("confirm", self._step_timeout, version, entries)

    def publish(self, version: int) -> None:
        """``version`` is what the engines serve from their next resume on."""
        self.version = version

    async def resume(self) -> None:
        """Open every gate: new tokens are tagged with the published version."""
        await self._all("resume", self._step_timeout, self.version)

    async def _all(self, method: str, seconds: float, *arguments: Any) -> list[Any]:
        """Call ``method`` on every engine, side by side; the first failure is raised at once."""
        calls = (
            _named(settings.name, method, getattr(handle, method).remote(*arguments), seconds)
            for settings, handle in zip(self._settings, self.handles, strict=True)
        )
        return list(await asyncio.gather(*calls))


async def _named(name: str, method: str, reference: Any, seconds: float | None = None) -> Any:
    """Await a call to an engine; failures and missed deadlines name the engine and the call."""
    try:
        return await asyncio.wait_for(_ref(reference), seconds)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(getattr(error, "cause", None), BaseException) else error
        raise EngineError(f"{name} failed in `{method}`: {_root(cause)}") from cause
    except ray.exceptions.RayActorError as error:
        raise EngineError(f"{name} died during `{method}`: {error}") from error
    except TimeoutError as error:  # last: what Ray raises for a remote TimeoutError is one too
        raise EngineError(f"{name} did not answer `{method}` within {seconds:.0f} s") from error


def _root(error: BaseException) -> str:
    """The text of an error; of a group of errors, the text of the first one inside."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _ref(reference: Awaitable[T]) -> Awaitable[T]:
    """A Ray object reference as an awaitable that ``asyncio.wait_for`` may cancel."""

    async def wait() -> T:
        return await reference

    return wait()
