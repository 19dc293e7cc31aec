"""An engine with a clock instead of a model: the methods, the order of things and the failures of a real one.

The clock is that of the event loop: on :class:`generator.virtual_time.VirtualTimeLoop` thousands of rollouts take
hours that pass at once. Token ``k`` of a rollout is a pure function of the seed, the rollout's id and ``k``, so a
rollout that was interrupted, carried over or begun again can be compared with one that was not, token for token.
What to submit next is decided by :mod:`generator.resume`, as in the real engine.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from generator.link import EngineError, EngineLostError, KvCache, PushMode, Returned
from generator.pressure import Pressure
from generator.resume import Finished, Sampling, next_submission
from generator.rollout import Rollout, Segment
from generator.simulated_stream import SimulatedSettings, fails_after, sequence_logprobs, whole_stream

if TYPE_CHECKING:
    from weight_sync.manifest import Manifest


@dataclass(eq=False, slots=True)
class _Call:
    """The rollouts of one ``generate`` call: they came together and are handed back together."""

    sampling: Sampling
    done: asyncio.Future[str]
    """Resolved with the reason that the call is handed back for, empty when all of it is finished."""
    work: list[_Work] = field(default_factory=list)
    unfinished: int = 0
    submitted: int = 0


@dataclass(eq=False, slots=True)
class _Work:
    """A rollout and, while ``submitted``, its request."""

    rollout: Rollout
    call: _Call
    stream: list[tuple[int, float]] | None = None
    """What is still to come of the rollout, the tokens of the request included."""
    resumed: bool = False
    """Whether the next submission is not the first of its turn."""
    touched: bool = False
    """Whether it was submitted here."""
    submitted: bool = False
    started: float | None = None
    """When the request would have begun, had it run without a break; ``None`` while it waits or is frozen."""
    versions: list[int] = field(default_factory=list)
    """Tags of the request's tokens up to the last freeze."""


class SimulatedEngine:
    """An :class:`generator.link.EngineLink`. What it does wrong it does on command, see the methods below."""

    workers = 1

    def __init__(self, name: str, settings: SimulatedSettings, *, refuse_start: bool = False) -> None:
        self.name = name
        self.settings = settings
        self.handle: SimulatedEngine = self
        self.version: int | None = None
        self.held: int | None = None
        """The version of the weights, served or not."""
        self._staged: tuple[int, Manifest] | None = None
        """What has arrived beside them."""
        self.refuse_start = refuse_start
        self.wrong_version: int | None = None
        """What the engine takes every version for that it is sent, if set."""
        self.refuse_weights = False
        self.refuse_swap = False
        self.logprob_error = 0.0
        """What its log-probabilities of given sequences are off by."""
        self.counts: dict[str, int] = {}
        """What every call returns as its counts."""
        self.called: Counter[str] = Counter()
        """Calls by method."""
        self._started = False
        self._ended = asyncio.Event()
        self._hung = False
        self._serving = False
        self._leaving = ""
        self._generated = 0
        self._calls: dict[_Call, None] = {}
        self._waiting: deque[_Work] = deque()
        self._running: set[_Work] = set()
        self._submitted = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._due: list[tuple[float, int, _Work]] = []
        """When running requests come to their end; a heap."""
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    # -- failing on command -----------------------------------------------------------------------------------------

    def die(self, error: str = "EngineDeadError: killed") -> None:
        """What runs the model is dead, the engine is there to say so: it hands everything back with all its tokens."""
        self._hand_back(f"lost: {error}")

    def hang(self) -> None:
        """No call is answered any more."""
        self._hung = True

    def kill(self) -> None:
        """The engine is gone, and with it what it has not returned yet."""
        self._ended.set()
        self._stop_timer()
        for call in self._calls:
            if not call.done.done():
                call.done.set_exception(self._lost("died during `generate`"))

    async def _travel(self, method: str) -> None:
        """A call on its way to the engine, or its answer on its way back."""
        if self.settings.latency:
            await asyncio.sleep(self.settings.latency)
        if self._hung and not self._ended.is_set():
            limit = None if method == "generate" else self.settings.answer_timeout
            try:
                await asyncio.wait_for(self._ended.wait(), limit)
            except TimeoutError:
                raise self._lost(f"did not answer `{method}` within {limit} s") from None
        if self._ended.is_set():
            raise self._lost(f"died during `{method}`")

    async def _arrive(self, method: str) -> None:
        self.called[method] += 1
        if not self._started and not self._ended.is_set():
            raise self._lost("has not been started")
        await self._travel(method)

    def _lost(self, what: str) -> EngineLostError:
        error = EngineLostError(f"{self.name} {what}")
        error.engine = self.name
        return error

    def _broken(self, what: str) -> EngineError:
        error = EngineError(f"{self.name} {what}")
        error.engine = self.name
        return error

    # -- lifetime ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self.called["start"] += 1
        try:
            await asyncio.wait_for(self._ended.wait(), self.settings.start_seconds)
        except TimeoutError:
            if self.refuse_start:
                raise self._broken("refuses to start") from None
            self._started = True
            self.held = self.settings.loaded_version
            return
        raise self._lost("died during `start`")

    async def shutdown(self) -> None:
        self.called["shutdown"] += 1
        self.kill()

    async def check_health(self) -> None:
        await self._arrive("check_health")
        if self._leaving.startswith("lost"):
            raise self._lost(f"is {self._leaving}")
        await self._travel("check_health")

    # -- generation -------------------------------------------------------------------------------------------------

    async def generate(self, rollouts: list[Rollout], sampling: Sampling | None = None) -> Returned:
        await self._arrive("generate")
        if self._leaving:
            return Returned(rollouts, self._leaving, frozenset(rollout.id for rollout in rollouts))
        call = _Call(sampling or self.settings.sampling, asyncio.get_running_loop().create_future())
        begun = call.sampling.turn_start
        call.work = [_Work(rollout, call, resumed=len(rollout.response_token_ids) > begun) for rollout in rollouts]
        call.unfinished = len(rollouts)
        self._calls[call] = None
        try:
            for work in call.work:
                self._submit(work)
            self._go_on()
            reason = await call.done
        finally:
            self._calls.pop(call, None)
            for work in call.work:  # the caller gave up
                if work.submitted:
                    self._take_back(work)
        await self._travel("generate")
        left = [work for work in call.work if work.rollout.finish_reason is None]
        untouched = frozenset(work.rollout.id for work in left if not work.touched)
        return Returned([work.rollout for work in call.work], reason, untouched, self.counts)

    def _submit(self, work: _Work) -> None:
        """Hand in what is next for the rollout, if the gate is open; or it is finished."""
        decision = next_submission(work.call.sampling, work.rollout)
        if len(work.rollout.response_token_ids) == fails_after(self.settings, work.call.sampling, work.rollout.id):
            decision = Finished("failed")
        if isinstance(decision, Finished):
            work.rollout = replace(work.rollout, finish_reason=decision.reason)
            work.call.unfinished -= 1
            if not work.call.unfinished:
                work.call.done.set_result("")
        elif self._serving:
            work.rollout = replace(work.rollout, resumes=work.rollout.resumes + work.resumed)
            work.resumed = work.submitted = work.touched = True
            work.call.submitted += 1
            self._submitted += 1
            self._idle.clear()
            self._waiting.append(work)

    def _go_on(self) -> None:
        """Start what waits as far as there is room, and look again when the first request ends."""
        while self._waiting and len(self._running) < self.settings.max_running:
            work = self._waiting.popleft()
            if work.submitted:
                self._running.add(work)
                self._run_on(work)
        self._stop_timer()
        if self._due:
            self._timer = asyncio.get_running_loop().call_at(self._due[0][0], self._end_due)

    def _run_on(self, work: _Work) -> None:
        """Sample from here: a request starts, or goes on after a freeze."""
        if work.stream is None:
            work.stream = whole_stream(self.settings, work.call.sampling, work.rollout)
        seconds = self.settings.token_seconds
        work.started = asyncio.get_running_loop().time() - len(work.versions) * seconds
        heapq.heappush(self._due, (work.started + len(work.stream) * seconds, next(self._order), work))

    def _end_due(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._due and self._due[0][0] <= now + 1e-9:
            work = heapq.heappop(self._due)[2]
            if work in self._running and work.started is not None:
                self._take_back(work)
                self._submit(work)
        self._go_on()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tag(self, work: _Work) -> None:
        """Give the tokens that were sampled since the last look the served version."""
        if work.started is not None:
            assert self.version is not None
            assert work.stream is not None
            passed = asyncio.get_running_loop().time() - work.started
            sampled = min(len(work.stream), int(passed / self.settings.token_seconds + 1e-6))
            work.versions += [self.version] * (sampled - len(work.versions))

    def _take_back(self, work: _Work) -> None:
        """The request ends here, with the tokens that it brought; the rollout has them."""
        self._tag(work)
        count = len(work.versions)
        for segment in self._segments(work):
            work.rollout = work.rollout.extended(segment)
        self._generated += count
        work.stream = work.stream[count:] if work.stream is not None else None
        work.submitted, work.started, work.versions = False, None, []
        work.call.submitted -= 1
        self._running.discard(work)
        self._submitted -= 1
        if not self._submitted:
            self._idle.set()

    def _segments(self, work: _Work) -> Iterator[Segment]:
        rows = zip(work.versions, (work.stream or [])[: len(work.versions)], strict=True)
        for version, run in itertools.groupby(rows, key=lambda row: row[0]):
            ids, logprobs = zip(*(token for _, token in run), strict=True)
            yield Segment(ids, logprobs, version)

    # -- pushes -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: PushMode, kv_cache: KvCache) -> int:
        await self._arrive("pause")
        self._serving = False
        interrupted = self._submitted
        if mode == "keep":
            self._freeze()
        else:
            if mode == "wait":
                await self._idle.wait()
            self._abort()
        await self._travel("pause")
        return interrupted

    def _freeze(self) -> None:
        for work in self._running:
            self._tag(work)
            work.started = None
        self._due = []
        self._stop_timer()

    def _abort(self) -> None:
        """Every request ends, running or waiting."""
        self._due = []
        self._stop_timer()
        for call in self._calls:
            for work in call.work:
                if work.submitted:
                    self._take_back(work)
                    self._submit(work)  # the gate is closed: only sees whether that was the last token
        self._waiting.clear()

    async def load(self, version: int, manifest: Manifest) -> None:
        """New weights arrive. Only a paused engine takes them."""
        await self._arrive("load")
        if self._serving:
            raise self._broken("got weights while it serves")
        self._take(version, manifest)
        await self._travel("load")

    async def stage(self, version: int, manifest: Manifest) -> None:
        """New weights arrive beside those that it holds."""
        await self._arrive("stage")
        if self.refuse_weights:
            raise self._broken("refuses weights")
        self._staged = version, manifest
        await self._travel("stage")

    async def swap(self, version: int) -> None:
        await self._arrive("swap")
        if self._serving:
            raise self._broken("was to swap weights while it serves")
        if self._staged is None or self._staged[0] != version:
            raise self._broken(f"was to swap in version {version} and has {self._staged} staged")
        if self.refuse_swap:
            raise self._broken("swaps nothing in")
        self._take(*self._staged)
        self._staged = None
        await self._travel("swap")

    def _take(self, version: int, manifest: Manifest) -> None:
        if self.refuse_weights:
            raise self._broken("refuses weights")
        self.held = version if self.wrong_version is None else self.wrong_version
        self._manifest = manifest

    async def confirm(self, version: int, manifest: Manifest) -> None:
        await self._arrive("confirm")
        if self.held != version or self._manifest != manifest:
            raise self._broken(f"confirms weights {self.held} instead of version {version}")
        await self._travel("confirm")

    async def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]] | None:
        await self._arrive("prompt_logprobs")
        if self._serving:
            raise self._broken("serves and computes no given sequences")
        right = sequence_logprobs(sequences)
        answer = [[logprob + self.logprob_error for logprob in row] for row in right]
        await self._travel("prompt_logprobs")
        return None if self._submitted else answer

    async def resume(self, version: int) -> None:
        await self._arrive("resume")
        if self._leaving:
            raise self._lost(f"cannot serve: it is {self._leaving}")
        if self.held != version:
            raise self._broken(f"holds weights {self.held} and cannot serve version {version}")
        self.version = version
        self._serving = True
        for work in self._running:  # frozen until now
            if work.started is None:
                self._run_on(work)
        for call in self._calls:
            for work in call.work if not call.done.done() else ():
                if not work.submitted and work.rollout.finish_reason is None:
                    self._submit(work)
        self._go_on()
        await self._travel("resume")

    # -- leaving ----------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        await self._arrive("drain")
        self._hand_back(self._leaving or "drained")
        await self._travel("drain")

    async def release(self, count: int) -> int:
        await self._arrive("release")
        released = 0
        for call in reversed([call for call in self._calls if not call.submitted and not call.done.done()]):
            if released >= count:
                break
            call.done.set_result("moved")
            released += len(call.work)
        await self._travel("release")
        return released

    def _hand_back(self, reason: str) -> None:
        self._leaving = reason
        self._serving = False
        self._abort()
        for call in self._calls:
            if not call.done.done():
                call.done.set_result(reason)

    # -- looking in -------------------------------------------------------------------------------------------------

    async def partial_rollouts(self) -> list[Rollout]:
        await self._arrive("partial_rollouts")
        rollouts = [self._partial(work) for call in self._calls for work in call.work]
        await self._travel("partial_rollouts")
        return rollouts

    def _partial(self, work: _Work) -> Rollout:
        """The rollout with what its request has brought so far; the request goes on."""
        rollout = work.rollout
        if work.submitted:
            self._tag(work)
            for segment in self._segments(work):
                rollout = rollout.extended(segment)
        return rollout

    async def stats(self) -> dict[str, float]:
        await self._arrive("stats")
        arriving = 0
        for work in self._running:
            self._tag(work)
            arriving += len(work.versions)
        counts = {
            "generated_tokens": self._generated + arriving,
            "in_flight": sum(call.unfinished for call in self._calls),
            "submitted": self._submitted,
        }
        await self._travel("stats")
        return {name: float(count) for name, count in counts.items()}

    async def pressure(self) -> Pressure:
        await self._arrive("pressure")
        used, preempted = 0, 0
        for work in sorted(self._running, key=lambda work: work.started or 0.0):
            self._tag(work)
            tokens = len(work.rollout.prompt_token_ids) + len(work.rollout.response_token_ids) + len(work.versions)
            preempted += 0 < self.settings.kv_tokens < used + tokens
            used += tokens
        await self._travel("pressure")
        if not self.settings.kv_tokens:
            return Pressure()
        return Pressure(min(1.0, used / self.settings.kv_tokens), preempted)
