"""The push protocol: how a new policy version gets from the learner into every engine.

The order is connect (only when engines joined or left), prepare, gate, transfer, confirm, verify (where the push is to
be proven), publish, resume. A staged push transfers before the gate, while engines generate, and swaps what arrived in
behind it. Up to the transfer, or the swap, the engines still hold the old version whole, so a failure there lets them
go on with it. From then on they may hold half of each: after a failure nothing is published and the gate stays closed
until a complete push.

A push that fails because of an engine costs that engine: it is ended, and the others get the whole version again,
through a new group. Nothing is ever retried inside a collective, and a group that failed is never used again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar

from weight_sync.canary import CanaryReport, Logprobs, Sequences, compare, differ
from weight_sync.manifest import Manifest
from weight_sync.push_error import PushError, engine_of
from weight_sync.verification import Verification

Result = TypeVar("Result")

__all__ = ["Engines", "Learner", "PushError", "PushReport", "Pusher", "Step", "engine_of"]

logger = logging.getLogger(__name__)


class Step(Enum):
    """Where a push stands. The values name the steps in errors, reports and metrics."""

    IDLE = "idle"
    CONNECT = "connect"
    PREPARE = "prepare"
    GATE = "gate"
    TRANSFER = "transfer"
    SWAP = "swap"
    CONFIRM = "confirm"
    VERIFY = "verify"
    PUBLISH = "publish"
    RESUME = "resume"


@dataclass(frozen=True, slots=True)
class PushReport:
    """A push that succeeded. ``bytes`` is the size of what was sent, ``dense_bytes`` that of all weights.

    ``seconds`` holds one entry a step; ``pause_seconds`` runs from gate to resume. ``canary`` is ``None`` where no
    engine was asked.
    """

    version: int
    bytes: int
    seconds: dict[str, float]
    pause_seconds: float
    dense_bytes: int
    canary: CanaryReport | None = None


class Learner(Protocol):
    """The sending side."""

    async def prepare(self, base: int | None) -> Manifest:
        """Check the weights, before generation is disturbed, and say what the engines will hold.

        What is sent may be what changed since version ``base``, which every engine holds; without one it is everything.
        """
        ...

    async def send(self, version: int, hashed: bool) -> int:
        """Move the weights into every engine, or beside what it serves if pushes are staged; the bytes of tensors sent.

        Returns when every engine has answered that all of them arrived and, if ``hashed``, that each is as it was sent.
        """
        ...

    async def logprobs(self, sequences: Sequences) -> Logprobs:
        """Log-probabilities of every token but the first, at temperature 1, under the weights that are sent next."""
        ...

    async def base_logprobs(self, sequences: Sequences) -> Logprobs:
        """The same with the adapters off. Asked only where an adapter is pushed."""
        ...


class Engines(Protocol):
    """The receiving side: every engine that serves or is about to."""

    @property
    def members_changed(self) -> bool:
        """Whether engines joined or left since the transfer group was built."""
        ...

    async def close_gate(self) -> None:
        """Submit nothing any more and stop what runs; sampled tokens are kept. Repeatable."""
        ...

    async def swap(self, version: int) -> None:
        """Have every engine put the staged weights of ``version`` in the place of those that it holds."""
        ...

    async def confirm(self, version: int, manifest: Manifest) -> None:
        """Return when every serving engine holds ``version``; raise naming the engine that does not."""
        ...

    async def prompt_logprobs(self, sequences: Sequences) -> Mapping[str, Logprobs | None]:
        """The same under the weights that each engine holds, by its name; its gate stays closed.

        ``None`` of an engine that could answer only by letting frozen requests run.
        """
        ...

    def publish(self, version: int) -> None:
        """From now on new tokens are sampled from ``version``."""
        ...

    async def resume(self) -> None:
        """Open the gate: unfinished rollouts first."""
        ...

    async def quarantine(self, engine: str | None, reason: str) -> bool:
        """End the ``engine`` that failed, if one is named, and all that do not answer. True if there were any."""
        ...


async def _nothing_to_connect() -> None:
    pass


@dataclass
class Pusher:
    """Runs pushes one at a time. ``timeout`` bounds each step, in seconds; ``clock`` returns seconds.

    ``verification`` says which pushes are proven: hashed on both sides, and by a canary before they are published.
    ``staged`` pushes pause the engines only once the weights have arrived; the learner has to send them so. ``deltas``
    lets the learner send what changed; every ``dense_every`` versions it sends everything all the same (0: never).

    ``connect`` builds the transfer group with the engines of the moment. ``drain_timeout`` is what closing the gate may
    take beside ``timeout``, where requests run to their end first. ``step`` says where the running push stands;
    ``published`` is the version published last, ``None`` before the first.
    """

    learner: Learner
    engines: Engines
    timeout: float
    connect: Callable[[], Awaitable[None]] = _nothing_to_connect
    drain_timeout: float = 0.0
    verification: Verification = field(default_factory=Verification)
    staged: bool = False
    deltas: bool = False
    dense_every: int = 0
    clock: Callable[[], float] = time.monotonic
    published: int | None = None
    step: Step = field(default=Step.IDLE, init=False)
    _unproven: bool = field(default=True, init=False)
    """Whether no push was proven since engines joined or left."""
    _adapter_unproven: bool = field(default=True, init=False)
    """Whether none of those proofs would have failed on an engine that computes without the adapter."""
    _held: int | None = field(default=None, init=False)
    """The version that every engine holds, byte for byte: the last one, unless something has happened since."""
    _seconds: dict[str, float] = field(default_factory=dict, init=False)

    async def push(self, version: int) -> PushReport:
        """Bring ``version`` into every engine and publish it.

        Raises :class:`PushError` naming the step that failed, unless ending the engines that caused it leaves others
        that succeed; refuses a second push while one runs, and a version older than the published one. The published
        version may be pushed again, for engines that joined.
        """
        if self.step is not Step.IDLE:
            raise PushError("start", f"version {version} was asked for while a push is at {self.step.value}")
        if self.published is not None and version < self.published:
            raise PushError("start", f"version {version} is older than the published version {self.published}")
        try:
            while True:
                try:
                    return await self._run(version)
                except PushError as failure:
                    if not await self.engines.quarantine(engine_of(failure), str(failure)):
                        raise
                    logger.warning("%s; the other engines get version %d again", failure, version)
        except BaseException as failure:
            await self._go_on(failure)
            raise
        finally:
            self.step = Step.IDLE

    async def _run(self, version: int) -> PushReport:
        self._seconds = {}
        if self.engines.members_changed:  # before prepare: it is the connection that makes the learner's sender
            await self._within(Step.CONNECT, self.connect)
            self._unproven = self._adapter_unproven = True
            self._held = None
        base, self._held = self._base(version), None
        manifest, expected, of_adapter = await self._within(Step.PREPARE, lambda: self._prepare(version, base))
        proven = bool(expected)
        sent = await self._transfer(version, base, proven, manifest) if self.staged else 0
        paused_at = self.clock()
        await self._within(Step.GATE, self.engines.close_gate, self.drain_timeout)
        if self.staged:
            await self._within(Step.SWAP, lambda: self.engines.swap(version))
        else:
            sent = await self._transfer(version, base, proven, manifest)
        await self._within(Step.CONFIRM, lambda: self.engines.confirm(version, manifest))
        canary = await self._within(Step.VERIFY, lambda: self._verify(expected)) if proven else None
        async with self._timed(Step.PUBLISH):
            self.engines.publish(version)
            self.published = self._held = version
        self._unproven = self._unproven and not proven
        self._adapter_unproven = self._adapter_unproven and not (of_adapter and canary is not None)
        await self._within(Step.RESUME, self.engines.resume)
        pause_seconds = self.clock() - paused_at
        return PushReport(version, sent, dict(self._seconds), pause_seconds, manifest.total_bytes, canary)

    def _base(self, version: int) -> int | None:
        """What the push of ``version`` may send the changes to; ``None`` where it must send everything."""
        if not self.deltas or (self.dense_every and version % self.dense_every == 0):
            return None
        return self._held

    async def _prepare(self, version: int, base: int | None) -> tuple[Manifest, Logprobs, bool]:
        """What the engines will hold and, where they are to prove it, what the learner computes with it; whether that
        is not what it computes without the adapter, within the canary's tolerance."""
        verification = self.verification
        manifest = await self.learner.prepare(base)
        wanted = verification.wanted(version, self._unproven)
        if not wanted and not (verification.of_adapters and self._adapter_unproven):
            return manifest, (), False
        expected = await self.learner.logprobs(verification.sequences)
        if not verification.of_adapters:
            return manifest, expected, False
        telling = differ(expected, await self.learner.base_logprobs(verification.sequences), verification.dtype)
        return manifest, expected if wanted or telling else (), telling

    async def _transfer(self, version: int, base: int | None, proven: bool, manifest: Manifest) -> int:
        """Send; the bytes that were sent."""
        sent = await self._within(Step.TRANSFER, lambda: self.learner.send(version, proven))
        if sent > manifest.total_bytes or (sent < manifest.total_bytes and base is None):
            raise PushError("transfer", f"{sent} bytes were sent, the manifest lists {manifest.total_bytes}")
        return sent

    async def _verify(self, expected: Logprobs) -> CanaryReport | None:
        """Raise :class:`weight_sync.canary.CanaryError` unless engines compute what the learner does."""
        answers = await self.engines.prompt_logprobs(self.verification.sequences)
        return compare(expected, answers, self.verification.dtype)

    async def _go_on(self, failure: BaseException) -> None:
        """Open the gates again after a failure to close them: every engine then still holds the old version whole."""
        if self.step is not Step.GATE or self.published is None:
            return
        try:
            async with asyncio.timeout(self.timeout):
                await self.engines.resume()
        except Exception as resuming:
            failure.add_note(f"and the engines could not be resumed on the old version: {resuming!r}")

    async def _within(self, step: Step, call: Callable[[], Awaitable[Result]], extra: float = 0.0) -> Result:
        limit = self.timeout + extra
        async with self._timed(step):
            try:
                async with asyncio.timeout(limit) as deadline:
                    return await call()
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                raise PushError(step.value, f"no answer within {limit:g} s (weight_sync.timeout)") from error

    @asynccontextmanager
    async def _timed(self, step: Step) -> AsyncIterator[None]:
        """Enter ``step``, record its seconds, and turn whatever it raises into a :class:`PushError` that names it."""
        self.step = step
        started = self.clock()
        try:
            yield
        except PushError as error:
            if error.step == step.value:
                raise
            raise PushError(step.value, error) from error
        except Exception as error:
            raise PushError(step.value, error) from error
        finally:
            self._seconds[step.value] = self.clock() - started
