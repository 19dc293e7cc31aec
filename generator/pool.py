"""All engines together: routes groups to them, carries rollouts over when one is lost, and takes part in a push.

The pool knows no framework: an engine is anything with the methods of :class:`generator.link.EngineLink`. A push costs
the driver one call per engine and step, however many rollouts are in flight. Which engines there are, and how they
come and go, is the matter of :mod:`generator.roster`; the pool gives them rollouts and weights.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from generator.link import EngineError, EngineLink, EngineLostError, Returned
from generator.pressure import Pressure, together
from generator.resume import Sampling
from generator.rollout import Rollout, further
from generator.roster import ABLE, PoolSettings, Roster, Slot, State, all_of

if TYPE_CHECKING:
    from weight_sync.manifest import Manifest

__all__ = ["EnginePool", "PoolSettings"]

logger = logging.getLogger(__name__)

OVERLOAD = 1.5
"""An engine with so many times the mean load gives rollouts away when there is a push anyway."""


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
        self.on_load: Callable[[str, int], None] | None = None
        """Told of the name of an engine, and how many rollouts it has, whenever that changes."""
        self._roster = Roster(make, settings)
        self.joined = self._roster.joined
        """Set while an engine waits for weights."""
        self.counts: Counter[str] = self._roster.counts
        """``engines/lost``, ``engines/restarted``, ``rollouts/moved`` (carried over with their tokens) and
        ``rollouts/restarted`` (what their engine had sampled last is gone with it), and what engines return."""
        self._members: list[Slot] = []
        self._in_flight: dict[str, Rollout] = {}
        """By id, with the tokens that they had when an engine took them last."""

    async def start(self) -> None:
        """Start every engine, side by side. Raises :class:`EngineError` naming the first that did not start."""
        await self._roster.start()

    async def shutdown(self) -> None:
        """End every engine; what does not end by itself is killed. Safe to call twice."""
        await self._roster.shutdown()

    async def set_count(self, count: int) -> None:
        """Have ``count`` engines from now on: start new ones, or drain those with the least load.

        Returns when drained engines are gone and new ones wait for weights. Raises :class:`EngineError` when a new one
        does not start; those that are there go on. A push that runs meanwhile may be made again from its beginning.
        """
        await self._roster.set_count(count)

    # -- generation -------------------------------------------------------------------------------------------------

    async def generate(self, rollouts: list[Rollout], sampling: Sampling | None = None) -> list[Rollout]:
        """Sample the rollouts of one group to their end, whatever happens to engines meanwhile.

        A group stays together, so that its rollouts share the prompt's KV blocks, and stays with its engine unless
        that is lost, drained or overloaded. Raises :class:`EngineError` when no engine is left or an invariant broke.
        """
        finished = {rollout.id: rollout for rollout in rollouts if rollout.finish_reason}
        pending = [rollout for rollout in rollouts if not rollout.finish_reason]
        self._in_flight.update(finished)
        try:
            while pending:
                self._in_flight.update((rollout.id, rollout) for rollout in pending)
                returned = await self._generate_on(await self._roster.until(self._least_loaded), pending, sampling)
                finished.update((rollout.id, rollout) for rollout in returned.rollouts if rollout.finish_reason)
                pending = [rollout for rollout in returned.rollouts if not rollout.finish_reason]
                self._in_flight.update(finished)
            return [finished[rollout.id] for rollout in rollouts]
        finally:
            for rollout in rollouts:
                self._in_flight.pop(rollout.id, None)

    def _least_loaded(self) -> Slot | None:
        return min(self._roster.within(State.SERVING), key=lambda slot: slot.load, default=None)

    async def _generate_on(self, slot: Slot, rollouts: list[Rollout], sampling: Sampling | None) -> Returned:
        self._add_load(slot, len(rollouts))
        try:
            returned = await slot.link.generate(rollouts, sampling)
        except EngineLostError as error:
            self._roster.lose(slot, error)
            self.counts["rollouts/restarted"] += len(rollouts)
            return Returned([replace(rollout, resumes=rollout.resumes + 1) for rollout in rollouts], "lost")
        finally:
            self._add_load(slot, -len(rollouts))
        self.counts.update(returned.counts)
        if stalled := returned.counts.get("rollouts/stalled"):
            logger.warning(
                "%s gave %d requests no token for so long (engine.rollout_timeout) that they were taken back",
                slot.link.name,
                stalled,
            )
        if returned.reason.startswith("lost"):
            self._roster.lose(slot, EngineLostError(f"{slot.link.name} is {returned.reason}"))
        if returned.reason:
            self.counts["rollouts/moved"] += sum(not rollout.finish_reason for rollout in returned.rollouts)
            begun = sampling.turn_start if sampling is not None else 0
            return replace(returned, rollouts=[_handed_back(rollout, returned, begun) for rollout in returned.rollouts])
        return returned

    def _add_load(self, slot: Slot, rollouts: int) -> None:
        slot.add_load(rollouts)
        if self.on_load is not None:
            self.on_load(slot.link.name, slot.load)

    async def serve_loaded(self, version: int) -> None:
        """Serve ``version`` from the engines that have loaded it when they started: no push brings it.

        To be called again when engines joined. Raises :class:`EngineError` when one holds another version.
        """
        await self.take_members()
        for slot in self._members:
            slot.version = version
        self.publish(version)
        await self.resume()

    # -- the engines' side of a push (weight_sync.push.Engines) -----------------------------------------------------

    @property
    def members_changed(self) -> bool:
        """Whether engines joined or left since the transfer group was built, see :meth:`take_members`."""
        return self._roster.changed

    async def take_members(self) -> list[EngineLink]:
        """The engines that will get the weights from now on; a transfer group has to be built of them.

        Waits for one when there is none. Raises :class:`EngineError` when there will be none.
        """
        self._members = await self._roster.until(self._able)
        self._roster.changed = False
        self.joined.clear()
        return [slot.link for slot in self._members]

    async def one_there(self) -> None:
        """Return when an engine can be given weights. Raises :class:`EngineError` when there will be none."""
        await self._roster.until(self._able)

    def _able(self) -> list[Slot]:
        return self._roster.within(*ABLE)

    async def close_gate(self) -> None:
        """Close every gate and stop what runs, as the mode says; :attr:`interrupted` counts the requests."""
        mode, kv_cache = self.settings.mode, self.settings.kv_cache
        self.interrupted = sum(await all_of(slot.link.pause(mode, kv_cache) for slot in self._members))

    async def swap(self, version: int) -> None:
        """Every engine puts the staged weights of ``version`` into its model."""
        await all_of(slot.link.swap(version) for slot in self._members)

    async def confirm(self, version: int, manifest: Manifest) -> None:
        """Every engine confirms that it holds ``version``, complete by ``manifest``."""
        await all_of(slot.link.confirm(version, manifest) for slot in self._members)
        for slot in self._members:
            slot.version = version

    async def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[list[float]] | None]:
        """What every engine computes for the sequences, by its name; ``None`` of one that holds frozen requests."""
        answers = await all_of(slot.link.prompt_logprobs(sequences) for slot in self._members)
        return dict(zip((slot.link.name for slot in self._members), answers, strict=True))

    def publish(self, version: int) -> None:
        """``version`` is what the engines serve from their next resume on."""
        self.version = version

    async def resume(self) -> None:
        """Open the gate of every engine that holds the published version: new tokens are tagged with it.

        Engines that joined serve from now on. One that is lost meanwhile costs nothing but itself.
        """
        assert self.version is not None, "nothing is resumed before a version is published"
        for slot in self._members:
            if slot.state is State.JOINING and slot.version != self.version:  # a push that failed before its transfer
                self._roster.changed = True
                self.joined.set()
        ready = [slot for slot in self._members if slot.state in ABLE and slot.version == self.version]
        # Before anything is handed back: it may go to an engine that serves from now on, and waits at its gate.
        for slot in ready:
            slot.state = State.SERVING
        await self._rebalance(ready)
        await all_of(self._unless_lost(slot, slot.link.resume(self.version)) for slot in ready)
        self._roster.look_again()

    async def quarantine(self, engine: str | None, reason: str) -> bool:
        """After a push that failed for this ``reason``: end the ``engine`` that failed, and all that do not answer.

        True if another try is worth while: engines of the failed push are gone, or there was none. Then there is one;
        raises :class:`EngineError` when there will be none.
        """
        for slot in self._members:
            if engine is not None and slot.link.name == engine:
                self._roster.lose(slot, EngineLostError(f"{engine} must not serve the weights that it holds: {reason}"))
        await self._roster.lose_the_dead(slot for slot in self._members if slot.state in ABLE)
        left = [slot for slot in self._members if slot.state in ABLE]
        try_again = len(left) < len(self._members) or not self._able()
        self._members = left
        if try_again:
            await self._roster.until(self._able)
        return try_again

    async def _rebalance(self, ready: list[Slot]) -> None:
        """While all are paused, engines with far more than their share hand some rollouts back."""
        if len(ready) < 2:
            return
        mean = sum(slot.load for slot in ready) / len(ready)
        full = [slot for slot in ready if slot.load > max(self.settings.max_running, OVERLOAD * mean)]
        await all_of(self._unless_lost(slot, slot.link.release(round(slot.load - mean))) for slot in full)

    async def _unless_lost(self, slot: Slot, call: Any) -> None:
        try:
            await call
        except EngineLostError as error:
            self._roster.lose(slot, error)

    # -- looking in -------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """How many engines there should be."""
        return self._roster.target

    @property
    def serving(self) -> int:
        """How many engines serve."""
        return len(self._roster.within(State.SERVING))

    async def pressure(self) -> Pressure:
        """The fullest KV cache and all preemptions since the last call, those in :attr:`counts` too.

        An engine that does not answer is left out: the health watch finds out why.
        """
        answers = await asyncio.gather(
            *(slot.link.pressure() for slot in self._roster.within(State.SERVING)), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineError):
                raise answer
        pressure = together(answer for answer in answers if isinstance(answer, Pressure))
        self.counts["engines/preemptions"] += pressure.preemptions
        return pressure

    async def partial_rollouts(self, limit: float = 30.0) -> list[Rollout]:
        """Every rollout in flight with its tokens so far, finished members of unfinished groups included.

        Those of an engine that does not answer within ``limit`` seconds, and those that wait for an engine, are as an
        engine took them last. Generation goes on meanwhile.
        """
        slots = self._roster.within(State.SERVING, State.DRAINING)
        answers = await asyncio.gather(*(_partial_of(slot.link, limit) for slot in slots))
        # No await from here on: an engine may have handed a rollout to another one, or to the caller, meanwhile.
        newest = dict(self._in_flight)
        for rollout in itertools.chain.from_iterable(answers):
            if rollout.id in newest:
                newest[rollout.id] = further(newest[rollout.id], rollout)
        return list(newest.values())


def _handed_back(rollout: Rollout, returned: Returned, turn_start: int) -> Rollout:
    """``rollout`` as the next engine gets it. That counts a resume for one with tokens of this turn; it cannot see
    that one without any was submitted before."""
    if rollout.finish_reason or len(rollout.response_token_ids) > turn_start or rollout.id in returned.untouched:
        return rollout
    return replace(rollout, resumes=rollout.resumes + 1)


async def _partial_of(link: EngineLink, limit: float) -> list[Rollout]:
    """What an engine has; nothing if it does not answer: the next call to it, or the health watch, finds out."""
    try:
        return await asyncio.wait_for(link.partial_rollouts(), limit)
    except (EngineError, TimeoutError):
        return []
