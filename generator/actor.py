"""An engine in a Ray actor, as the pool sees it: every call has a deadline, every error names the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from generator.engine import Engine
from generator.launch import EngineSettings
from generator.link import EngineError, EngineLostError, KvCache, PushMode, Returned, root_cause
from generator.pressure import Pressure
from generator.resume import Sampling
from generator.rollout import Rollout

if TYPE_CHECKING:
    from weight_sync.manifest import Manifest

T = TypeVar("T")

SHUTDOWN_SECONDS = 5.0
HEALTH_SECONDS = 30.0
"""How long an engine may take to say that it is well: its event loop may be busy with thousands of requests."""
MAX_CONCURRENT_CALLS = 100_000
"""Groups an engine actor may hold at once; admission, not the actor, is what bounds concurrency."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What one engine actor reserves in the Ray cluster."""

    cpus: float = 0.0
    gpus: float = 0.0


class RayEngine:
    """The methods of :class:`generator.engine.Engine` over an actor of its own.

    ``start_timeout`` and ``step_timeout`` are seconds. Raises :class:`EngineLostError` when the actor is gone or does
    not answer in time, :class:`EngineError` with the cause for what the engine itself raised.
    """

    def __init__(
        self, settings: EngineSettings, resources: Resources, start_timeout: float, step_timeout: float
    ) -> None:
        self.name = settings.name
        self.workers = settings.tensor_parallel
        """Processes of this engine that take part in a weight transfer."""
        self.handle: Any = None
        """The Ray actor, once started."""
        self._settings = settings
        self._resources = resources
        self._start_timeout = start_timeout
        self._step_timeout = step_timeout

    async def start(self) -> None:
        """Create the actor and load the model."""
        actor = ray.remote(
            num_cpus=self._resources.cpus, num_gpus=self._resources.gpus, max_concurrency=MAX_CONCURRENT_CALLS
        )(Engine)
        self.handle = actor.remote(self._settings)
        await self._call("start", self._start_timeout, key="engine.start_timeout")

    async def generate(self, rollouts: list[Rollout], sampling: Sampling | None = None) -> Returned:
        """No deadline here: the engine itself gives up rollouts that make no progress, and a dead engine raises."""
        result: Returned = await self._call("generate", None, rollouts, sampling)
        return result

    async def pause(self, mode: PushMode, kv_cache: KvCache) -> int:
        drain = self._settings.drain_timeout if mode == "wait" else 0.0
        interrupted: int = await self._call("pause", self._step_timeout + drain, mode, kv_cache)
        return interrupted

    async def swap(self, version: int) -> None:
        await self._call("swap", self._step_timeout, version)

    async def confirm(self, version: int, manifest: Manifest) -> None:
        await self._call("confirm", self._step_timeout, version, manifest)

    async def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]] | None:
        answer: list[list[float]] | None = await self._call("prompt_logprobs", self._step_timeout, sequences)
        return answer

    async def resume(self, version: int) -> None:
        await self._call("resume", self._step_timeout, version)

    async def drain(self) -> None:
        await self._call("drain", self._step_timeout)

    async def release(self, count: int) -> int:
        released: int = await self._call("release", self._step_timeout, count)
        return released

    async def check_health(self) -> None:
        await self._call("check_health", HEALTH_SECONDS)

    async def partial_rollouts(self) -> list[Rollout]:
        rollouts: list[Rollout] = await self._call("partial_rollouts", self._step_timeout)
        return rollouts

    async def pressure(self) -> Pressure:
        pressure: Pressure = await self._call("pressure", self._step_timeout)
        return pressure

    async def shutdown(self) -> None:
        """End the engine within ``SHUTDOWN_SECONDS``; if it has not ended by then it is killed."""
        try:
            if self.handle is not None:
                await self._call("shutdown", SHUTDOWN_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the actor at once; vLLM's processes end with it, see ``generator.orphan``."""
        if self.handle is not None:
            ray.kill(self.handle)

    async def _call(self, method: str, seconds: float | None, *arguments: Any, key: str = "") -> Any:
        """The actor's answer within ``seconds``, which the configuration sets as ``key``."""
        try:
            if self.handle is None:
                raise EngineLostError(f"{self.name} has not been started")
            return await asyncio.wait_for(_ref(getattr(self.handle, method).remote(*arguments)), seconds)
        except ray.exceptions.RayTaskError as error:
            cause = root_cause(error.cause if isinstance(getattr(error, "cause", None), BaseException) else error)
            kind = EngineLostError if isinstance(cause, EngineLostError) else EngineError
            raise self._named(kind(f"{self.name} failed in `{method}`: {type(cause).__name__}: {cause}")) from cause
        except ray.exceptions.RayActorError as error:
            # Ray's own words run over a dozen lines; the first one says what happened.
            first_line = str(error).partition("\n")[0]
            raise self._named(EngineLostError(f"{self.name} died during `{method}`: {first_line}")) from error
        except TimeoutError as error:  # last: what Ray raises for a remote TimeoutError is one too
            late = f"{self.name} did not answer `{method}` within {seconds:g} s" + (f" ({key})" if key else "")
            raise self._named(EngineLostError(late)) from error

    def _named(self, error: EngineError) -> EngineError:
        error.engine = self.name
        return error


def _ref(reference: Awaitable[T]) -> Awaitable[T]:
    """A Ray object reference as an awaitable that ``asyncio.wait_for`` may cancel."""

    async def wait() -> T:
        return await reference

    return wait()
