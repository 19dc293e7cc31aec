"""Which engines there are: they are started, wait for weights, serve, and leave by being drained or by being lost.

A lost engine is replaced by a new one as long as ``max_restarts`` lasts. Before it is ended it gets a moment to hand
its rollouts back: often only what runs the model has died, and the tokens are still there.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeVar

from generator.link import EngineError, EngineLink, KvCache, PushMode

T = TypeVar("T")

logger = logging.getLogger(__name__)

HEALTH_INTERVAL = 5.0
"""Seconds between looks at engines that nobody is calling."""
HAND_BACK_SECONDS = 5.0
"""How long a lost engine may take to hand back what it has."""
DRAIN_SECONDS = 60.0
"""The same for an engine that is drained: it works, and what it does not hand back is sampled again."""
BACK_OFF_LIMIT = 60.0
"""Longest pause, in seconds, before the next try to start an engine; the first is 1 s, each doubles the last."""


class State(IntEnum):
    """Where an engine stands. Only a serving one gets rollouts."""

    STARTING = 0
    JOINING = 1
    SERVING = 2
    DRAINING = 3
    LOST = 4


ABLE = (State.JOINING, State.SERVING)
"""Takes part in a push."""


@dataclass(eq=False, slots=True)
class Slot:
    """An engine and how many rollouts the pool has given it and has not got back."""

    link: EngineLink
    state: State = State.STARTING
    version: int | None = None
    """What it has confirmed to hold."""
    load: int = 0
    unloaded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the load is 0."""

    def __post_init__(self) -> None:
        self.unloaded.set()

    def add_load(self, rollouts: int) -> None:
        """``rollouts`` more, or fewer."""
        self.load += rollouts
        if self.load:
            self.unloaded.clear()
        else:
            self.unloaded.set()


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How a pool behaves. Timeouts are in seconds."""

    count: int
    max_running: int
    """Rollouts an engine runs at a time; what it has beyond that waits inside it."""
    max_restarts: int
    """Engines that may be replaced in a run."""
    serve_timeout: float
    """How long rollouts wait for an engine to serve when none does."""
    mode: PushMode
    kv_cache: KvCache


class Roster:
    """The engines of a pool. ``make(number)`` builds the link of a new one; numbers are never used twice."""

    def __init__(self, make: Callable[[int], EngineLink], settings: PoolSettings) -> None:
        self.settings = settings
        self.slots: list[Slot] = []
        """All that have neither left nor been lost."""
        self.changed = True
        """Whether engines joined or left since somebody set this to false."""
        self.joined = asyncio.Event()
        """Set while an engine waits for weights."""
        self.counts: Counter[str] = Counter()
        """``engines/lost`` and ``engines/restarted``."""
        self._make = make
        self._numbers = itertools.count()
        self.target = settings.count
        """How many engines there should be."""
        self._news = asyncio.Event()
        self._first_loss: BaseException | None = None
        self._failure: EngineError | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    def within(self, *states: State) -> list[Slot]:
        """The engines that stand there, in the order in which they were started."""
        return [slot for slot in self.slots if slot.state in states]

    async def until(self, found: Callable[[], T | None]) -> T:
        """What ``found`` returns, once that is true. It is asked again whenever an engine has changed its state.

        Raises :class:`EngineError` when there will be no engine any more, or after ``serve_timeout``.
        """
        if self._failure is None and (result := found()):
            return result  # by far the commonest case needs no timer
        limit = self.settings.serve_timeout
        try:
            async with asyncio.timeout(limit) as deadline:
                while True:
                    if self._failure is not None:
                        raise self._failure
                    if result := found():
                        return result
                    await self._news.wait()
        except TimeoutError:
            if not deadline.expired():
                raise
            raise EngineError(f"no engine has served for {limit:.0f} s (engine.start_timeout)") from None

    def look_again(self) -> None:
        """Whoever waits in :meth:`until` looks again."""
        self._news.set()
        self._news = asyncio.Event()

    # -- coming -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every engine, side by side. Raises :class:`EngineError` naming the first that did not start."""
        await self._start_some(self.target)
        self._spawn(self._watch_health(), "engine health")

    async def set_count(self, count: int) -> None:
        """Have ``count`` engines from now on: start new ones, or drain those with the least load.

        Returns when drained engines are gone and new ones wait for weights. Raises :class:`EngineError` when a new one
        does not start; those that are there go on. A push that runs meanwhile may be made again from its beginning.
        """
        if count < 1:
            raise ValueError(f"a pool needs at least one engine, not {count}")
        self.target = count
        there = self.within(State.STARTING, *ABLE)
        leaving = sorted(there, key=lambda slot: (slot.state, slot.load))[: max(0, len(there) - count)]
        await asyncio.gather(*(self._drain(slot) for slot in leaving))
        await self._start_some(count - len(there))

    async def _start_some(self, count: int) -> None:
        """Side by side; when one fails the others are not waited for."""
        tasks = [self._spawn(self._start_one(), "engine start") for _ in range(count)]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise

    async def _start_one(self) -> None:
        slot = Slot(self._make(next(self._numbers)))
        self.slots.append(slot)
        try:
            await slot.link.start()
        except BaseException as error:
            slot.link.kill()
            if slot.state is State.DRAINING and isinstance(error, EngineError):
                return  # it was not wanted any more
            slot.state = State.LOST
            self._strike(slot)
            raise
        if slot.state is State.DRAINING:
            return
        slot.state = State.JOINING
        self.joined.set()
        self._has_changed()

    # -- leaving ----------------------------------------------------------------------------------------------------

    async def _drain(self, slot: Slot) -> None:
        """Take an engine out that works; its rollouts go on elsewhere."""
        if slot.state is State.STARTING:
            slot.link.kill()
        state, slot.state = slot.state, State.DRAINING
        self._has_changed()
        try:
            if state is not State.STARTING:
                await self._hand_back(slot, DRAIN_SECONDS)
                await slot.link.shutdown()
        except EngineError as error:
            logger.info("%s did not end by itself: %s", slot.link.name, error)
        finally:
            slot.link.kill()
            self._strike(slot)

    def _strike(self, slot: Slot) -> None:
        """Off the roster, if it is still on it: a shutdown clears it at once."""
        with suppress(ValueError):
            self.slots.remove(slot)

    async def _hand_back(self, slot: Slot, limit: float) -> None:
        """Ask an engine for all it has, and wait until that has arrived."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                with suppress(EngineError):
                    await slot.link.drain()
                await slot.unloaded.wait()

    def lose(self, slot: Slot, error: BaseException) -> None:
        """An engine is gone, or as good as gone: end what is left of it and have another one started."""
        if slot.state in (State.DRAINING, State.LOST) or self._closing:
            return
        slot.state = State.LOST
        self._strike(slot)
        self._has_changed()
        self._first_loss = self._first_loss or error
        self.counts["engines/lost"] += 1
        logger.warning("%s is lost; its rollouts go on elsewhere: %s", slot.link.name, error)
        self._spawn(self._replace(slot, error), "engine replacement")

    async def lose_the_dead(self, slots: Iterable[Slot]) -> bool:
        """Ask the engines whether they are well and lose those that are not. True if there were any."""
        slots = list(slots)
        results = await asyncio.gather(*(slot.link.check_health() for slot in slots), return_exceptions=True)
        dead = [(slot, error) for slot, error in zip(slots, results, strict=True) if isinstance(error, Exception)]
        for slot, error in dead:
            self.lose(slot, error)
        return bool(dead)

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL)
            await self.lose_the_dead(self.within(*ABLE))

    async def _replace(self, lost: Slot, cause: BaseException) -> None:
        """End a lost engine; start engines until there are as many as there should be, or the restarts are used up."""
        try:
            await self._hand_back(lost, HAND_BACK_SECONDS)
        finally:
            lost.link.kill()
        back_off = 1.0
        while len(there := self.within(State.STARTING, *ABLE)) < self.target:
            if self.counts["engines/restarted"] >= self.settings.max_restarts:
                if not there:
                    self._fail(cause)
                return
            self.counts["engines/restarted"] += 1
            try:
                await self._start_one()
            except Exception as error:  # whatever kept it from starting, the tries are bounded
                cause = error
                logger.warning("an engine did not start, the next try is in %.0f s: %s", back_off, error)
                await asyncio.sleep(back_off)
                back_off = min(2 * back_off, BACK_OFF_LIMIT)

    def _fail(self, last: BaseException) -> None:
        """There will be no engine any more: whoever waits for one gets to know why."""
        self._failure = EngineError(
            f"no engine is left and engine.max_restarts={self.settings.max_restarts} is used up; the first was lost "
            f"because of: {self._first_loss}; the last one because of: {last}"
        )
        self._failure.__cause__ = last
        self.look_again()

    async def shutdown(self) -> None:
        """End every engine; what does not end by itself is killed. Safe to call twice."""
        self._closing = True
        self._failure = EngineError("the engines have been shut down")
        tasks, slots = list(self._tasks), self.slots
        self.slots = []
        for task in tasks:
            task.cancel()
        self.look_again()
        results = await asyncio.gather(*(slot.link.shutdown() for slot in slots), return_exceptions=True)
        for slot, result in zip(slots, results, strict=True):
            slot.link.kill()
            if isinstance(result, BaseException):
                logger.info("%s did not end by itself: %s", slot.link.name, result)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _has_changed(self) -> None:
        self.changed = True
        self.look_again()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """No error of a task that nobody awaits goes unseen."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, EngineError):
            self._failure = EngineError(f"{task.get_name()} failed: {type(error).__name__}: {error}")
            self._failure.__cause__ = error
            self.look_again()


async def all_of(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Side by side, each to its end, so that none comes late into what is done next. Then the first error is raised.

    The errors of the others are notes of the first.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"and beside it: {other}")
        raise errors[0]
    return [result for result in results if not isinstance(result, BaseException)]
