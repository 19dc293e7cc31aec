"""All engines together: routes groups to them, carries rollouts over when one is lost, and takes part in a push.

The pool knows no framework: an engine is anything with the methods of :class:`generator.link.EngineLink`. A push costs
the driver one call per engine and step, however many rollouts are in flight.

An engine's way: it is started, then *joins* (it waits for the next push to bring it the weights), then *serves*. It
leaves by being drained or by being lost. A lost engine is replaced by a new one as long as ``max_restarts`` lasts.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from generator.link import EngineError, EngineLink, EngineLostError, KvCache, PushMode, Returned
from generator.resume import Sampling
from generator.rollout import Rollout

logger = logging.getLogger(__name__)

HEALTH_INTERVAL = 5.0
"""Seconds between looks at engines that nobody is calling."""
OVERLOAD = 1.5
"""An engine with so many times the mean load gives rollouts away when there is a push anyway."""


class State(Enum):
    """Where an engine stands. Only a serving one gets rollouts."""

    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(eq=False, slots=True)
class Slot:
    """An engine that was started, and the rollouts the pool has given it."""

    link: EngineLink
    state: State = State.JOINING
    load: int = 0


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How a pool behaves. Timeouts are in seconds."""

    count: int = 1
    max_running: int = 64
    """Rollouts an engine runs at a time; what it has beyond that waits inside it."""
    max_restarts: int = 10
    """Engines that may be replaced in a run."""
    serve_timeout: float = 900.0
    """How long rollouts wait for an engine to serve when none does."""
    mode: PushMode = "abort"
    kv_cache: KvCache = "recompute"


class EnginePool:
    """Any number of engines behind one interface. Not thread-safe: call it from one event loop.

    ``make(number)`` builds the link of a new engine; numbers are never used twice.
    """

    def __init__(self, make: Callable[[int], EngineLink], settings: PoolSettings) -> None:
        self.settings = settings
        self.version: int | None = None
        """The published version, ``None`` before the first push."""
        self.interrupted = 0
        """Requests that the last push interrupted."""
        self.members_changed = True
        """Whether engines joined or left since the transfer group was built, see :meth:`take_members`."""
        self.joined = asyncio.Event()
        """Set while an engine waits for weights."""
        self.counts: Counter[str] = Counter()
        """``engines/lost``, ``engines/restarted``, ``rollouts/moved`` (carried over with their tokens) and
        ``rollouts/restarted`` (what their engine had sampled last is gone with it)."""
        self._make = make
        self._numbers = itertools.count()
        self._target = settings.count
        self._starting = 0
        self._slots: list[Slot] = []
        self._members: list[Slot] = []
        self._changed = asyncio.Event()
        self._failure: EngineError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    # -- lifetime ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every engine, side by side. Raises :class:`EngineError` naming the first that did not start."""
        await _all([self._start_one() for _ in range(self._target)])
        self._spawn(self._watch_health(), "engine health")

    async def shutdown(self) -> None:
        """End every engine; what does not end by itself is killed. Safe to call twice."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        slots, self._slots = self._slots, []
        self._look_again()
        results = await asyncio.gather(*(slot.link.shutdown() for slot in slots), return_exceptions=True)
        for slot, result in zip(slots, results, strict=True):
            if isinstance(result, BaseException):
                logger.info("%s did not end by itself: %s", slot.link.name, result)

    async def set_count(self, count: int) -> None:
        """Have ``count`` engines from now on: start new ones, or drain those with the least load.

        Returns when drained engines are gone and new ones wait for weights. Not to be called during a push.
        """
        if count < 1:
            raise ValueError(f"a pool needs at least one engine, not {count}")
        self._target = count
        alive = [slot for slot in self._slots if slot.state in (State.JOINING, State.SERVING)]
        leaving = sorted(alive, key=lambda slot: slot.load)[: max(0, len(alive) - count)]
        await _all([self._drain(slot) for slot in leaving])
        missing = count - len(alive) - self._starting
        await _all([self._start_one() for _ in range(missing)])

    async def _start_one(self) -> None:
        link = self._make(next(self._numbers))
        self._starting += 1
        try:
            await link.start()
        except BaseException:
            link.kill()
            raise
        finally:
            self._starting -= 1
        self._slots.append(Slot(link))
        self.members_changed = True
        self.joined.set()
        self._look_again()

    async def _drain(self, slot: Slot) -> None:
        slot.state = State.DRAINING
        self.members_changed = True
        try:
            await slot.link.drain()
            await slot.link.shutdown()
        except EngineError as error:
            logger.warning("%s was to be drained and is ended instead: %s", slot.link.name, error)
            slot.link.kill()
        self._slots.remove(slot)

    # -- generation -------------------------------------------------------------------------------------------------

    async def generate(self, rollouts: list[Rollout], sampling: Sampling | None = None) -> list[Rollout]:
        """Sample the rollouts of one group to their end, whatever happens to engines meanwhile.

        A group stays together, so that its rollouts share the prompt's KV blocks, and stays with its engine unless
        that is lost, drained or overloaded. Raises :class:`EngineError` when no engine is left or an invariant broke.
        """
        finished: dict[str, Rollout] = {}
        pending = rollouts
        while pending:
            returned = await self._generate_on(await self._place(), pending, sampling)
            finished |= {rollout.id: rollout for rollout in returned.rollouts if rollout.finish_reason is not None}
            # Whatever an engine took is a resume on the next one, sampled tokens or not.
            unfinished = (rollout for rollout in returned.rollouts if rollout.finish_reason is None)
            pending = [replace(rollout, resumes=rollout.resumes + 1) for rollout in unfinished]
        return [finished[rollout.id] for rollout in rollouts]

    async def _place(self) -> Slot:
        """The serving engine with the least load; waits for one if there is none."""
        async with asyncio.timeout(self.settings.serve_timeout) as deadline:
            try:
                while True:
                    serving = [slot for slot in self._slots if slot.state is State.SERVING]
                    if serving:
                        return min(serving, key=lambda slot: slot.load)
                    if self._failure is not None:
                        raise self._failure
                    await self._changed.wait()
            except asyncio.CancelledError:
                if deadline.expired():
                    raise EngineError(
                        f"no engine has served for {self.settings.serve_timeout:.0f} s (engine.start_timeout)"
                    ) from None
                raise

    async def _generate_on(self, slot: Slot, rollouts: list[Rollout], sampling: Sampling | None) -> Returned:
        slot.load += len(rollouts)
        try:
            returned = await slot.link.generate(rollouts, sampling)
        except EngineLostError as error:
            self._lose(slot, error)
            self.counts["rollouts/restarted"] += len(rollouts)
            return Returned(rollouts, "lost")
        finally:
            slot.load -= len(rollouts)
        if returned.reason.startswith("lost"):
            self._lose(slot, EngineLostError(f"{slot.link.name} is {returned.reason}"))
        self.counts["rollouts/moved"] += sum(rollout.finish_reason is None for rollout in returned.rollouts)
        return returned

    # -- lost engines -----------------------------------------------------------------------------------------------

    def _lose(self, slot: Slot, error: BaseException) -> None:
        """An engine is gone: end what is left of it and have another one started."""
        if slot.state is State.LOST or self._closing:
            return
        planned = slot.state is State.DRAINING
        slot.state = State.LOST
        if slot in self._slots:
            self._slots.remove(slot)
        slot.link.kill()
        self.members_changed = True
        if planned:
            return
        self.counts["engines/lost"] += 1
        logger.warning("%s is lost; its rollouts go on elsewhere: %s", slot.link.name, error)
        self._spawn(self._replace(error), "engine replacement")

    async def _replace(self, cause: BaseException) -> None:
        """Start engines until there are as many as there should be, or the restarts are used up."""
        while len(self._slots) + self._starting < self._target:
            if self.counts["engines/restarted"] >= self.settings.max_restarts:
                if not self._slots and not self._starting:
                    limit = f"engine.max_restarts={self.settings.max_restarts}"
                    self._failure = EngineError(f"no engine is left and {limit} is used up; the last one: {cause}")
                    self._failure.__cause__ = cause
                    self._look_again()
                return
            self.counts["engines/restarted"] += 1
            try:
                await self._start_one()
            except EngineError as error:
                logger.warning("an engine that was to replace a lost one did not start: %s", error)
                cause = error

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL)
            await self._lose_the_dead(self._slots)

    async def _lose_the_dead(self, slots: Sequence[Slot]) -> bool:
        slots = list(slots)
        results = await asyncio.gather(*(slot.link.check_health() for slot in slots), return_exceptions=True)
        dead = [(slot, error) for slot, error in zip(slots, results, strict=True) if isinstance(error, Exception)]
        for slot, error in dead:
            self._lose(slot, error)
        return bool(dead)

    # -- the engines' side of a push (weight_sync.push.Engines) --------------------------------------------------------

    async def take_members(self) -> list[EngineLink]:
        """The engines that will get the weights from now on; a transfer group has to be built of them.

        Waits for one when there is none. Raises :class:`EngineError` when there will be none.
        """
        async with asyncio.timeout(self.settings.serve_timeout):
            while not (alive := [slot for slot in self._slots if slot.state in (State.JOINING, State.SERVING)]):
                if self._failure is not None:
                    raise self._failure
                await self._changed.wait()
        self._members = alive
        self.members_changed = False
        self.joined.clear()
        return [slot.link for slot in alive]

    async def close_gate(self) -> None:
        """Close every gate and stop what runs, as the mode says; :attr:`interrupted` counts the requests."""
        settings = self.settings
        pauses = [slot.link.pause(settings.mode, settings.kv_cache) for slot in self._members]
        self.interrupted = sum(await _all(pauses))

    async def confirm(self, version: int, manifest: Any) -> None:
        """Every engine confirms that it holds ``version``, complete by ``manifest``."""
        entries = tuple((entry.name, entry.dtype, tuple(entry.shape)) for entry in manifest.entries)
        await _all([slot.link.confirm(version, entries) for slot in self._members])

    def publish(self, version: int) -> None:
        """``version`` is what the engines serve from their next resume on."""
        self.version = version

    async def resume(self) -> None:
        """Open every gate: new tokens are tagged with the published version. Engines that joined serve from now on."""
        assert self.version is not None, "nothing is resumed before a version is published"
        # Before anything is handed back: it may go to an engine that serves from now on, and waits at its gate.
        for slot in self._members:
            if slot.state is State.JOINING:
                slot.state = State.SERVING
        await self._rebalance()
        await _all([slot.link.resume(self.version) for slot in self._members])
        self._look_again()

    async def quarantine(self, engine: str | None) -> bool:
        """After a failed push: end the ``engine`` that failed, and all that do not answer. True if there were any."""
        named = [slot for slot in self._members if engine is not None and slot.link.name == engine]
        for slot in named:
            self._lose(slot, EngineLostError(f"{engine} failed in a push and may hold half of the weights"))
        others = [slot for slot in self._members if slot.state is not State.LOST]
        return await self._lose_the_dead(others) or bool(named)

    async def _rebalance(self) -> None:
        """While all are paused, engines with far more than their share hand some rollouts back."""
        if self.settings.mode != "abort" or len(self._members) < 2:
            return
        mean = sum(slot.load for slot in self._members) / len(self._members)
        full = [s for s in self._members if s.load > max(self.settings.max_running, OVERLOAD * mean)]
        await _all([slot.link.release(round(slot.load - mean)) for slot in full])

    # -- looking in -------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """How many engines there should be."""
        return self._target

    @property
    def serving(self) -> int:
        """How many engines serve."""
        return sum(slot.state is State.SERVING for slot in self._slots)

    async def partial_rollouts(self) -> list[Rollout]:
        """Every rollout in flight with its tokens so far."""
        return [rollout for part in await _all([s.link.partial_rollouts() for s in self._slots]) for rollout in part]

    async def stats(self) -> dict[str, dict[str, float]]:
        """The counters of every engine, by its name."""
        slots = list(self._slots)
        return dict(zip([s.link.name for s in slots], await _all([s.link.stats() for s in slots]), strict=True))

    def _look_again(self) -> None:
        """Whoever waits for an engine looks whether there is one now."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _all(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """Side by side; the first failure is raised at once, and what the others do then is nobody's concern."""
    return list(await asyncio.gather(*calls))
