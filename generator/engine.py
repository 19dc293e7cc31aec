"""One vLLM engine with a gate: the only module that speaks with a running vLLM.

The resume loop runs here, next to vLLM's ``AsyncLLM``, so that a push with thousands of requests in flight costs no
round trips through the driver. An engine serves only while its gate is open; the gate opens when a version is
published and closes when a push begins. Nothing is ever submitted to a paused vLLM engine (R10).

Whatever happens to a request (a push, a stall, a drain, the death of vLLM), the tokens that it brought stay with its
rollout. Rollouts that this engine cannot finish go back to the caller, who may finish them elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from generator.launch import EngineSettings, build_llm, sampling_params
from generator.link import EngineError, EngineLostError, KvCache, PushMode, Returned
from generator.orphan import announce_parent
from generator.pressure import Pressure, PressureGauge
from generator.prestart import prestart_core
from generator.prompt_logprobs import prompt_logprobs
from generator.receiver import WeightReceiver
from generator.request import Request, VersionMismatchError
from generator.resume import Finished, Sampling, Submission, next_submission
from generator.rollout import Rollout
from generator.stops import Decode, StopMatcher, load_decode

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from weight_sync.adapter_files import AdapterFiles

logger = logging.getLogger(__name__)

COUNTS = ("rollouts/stalled", "tokens/cached", "tokens/surplus")
"""Metrics that every ``generate`` call returns: requests that got no token in time and were taken back, prompt tokens
found in the prefix cache, tokens sampled behind a stop string before the request could be ended."""
SHUTDOWN_SECONDS = 1.0
"""How long vLLM's processes may take to end before they are killed: they hold nothing that must be saved."""


@dataclass(eq=False, slots=True)
class _Call:
    """The rollouts of one ``generate`` call: they came together and are handed back together."""

    sampling: Sampling
    size: int
    leaving: str = ""
    untouched: set[str] = field(default_factory=set)
    """Ids of the rollouts that were not submitted yet."""
    submitted: int = 0
    """Its requests at vLLM now."""
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTS, 0)))


class Engine(WeightReceiver):
    """A vLLM engine with a gate. Meant to live in an actor; every method but the constructor is a coroutine."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings.name, adapted=settings.lora_rank > 0)
        os.environ.update(settings.environment)
        announce_parent()
        if settings.prestart_core:
            prestart_core()
        self.settings = settings
        self.version: int | None = None
        self._llm: AsyncLLM | None = None
        self._serving = False
        """Whether the gate is open."""
        self._paused = False
        """Whether nothing is sampled until the next resume."""
        self._turn = asyncio.Lock()
        """Pauses, resumes and starts of weight updates have effect one after the other, in the order of the calls."""
        self._latest = 0
        """Number of the newest pause or resume."""
        self._leaving = ""
        """Why this engine takes no rollouts any more."""
        self._changed = asyncio.Event()
        """Set, and replaced, whenever what waits at the gate has to look again."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._calls: list[_Call] = []
        """In the order in which they came."""
        self._requests: dict[str, Request] = {}
        """What was handed to vLLM and has not come back, by the rollout's id."""
        self._live: dict[str, Rollout] = {}
        """Every rollout of the calls as of its last request, by id; finished ones until their call returns."""
        self._ids = itertools.count()
        self._generated = 0
        self._decode: Decode | None = None
        self._gauge = PressureGauge()

    # -- lifetime ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model, with random weights unless ``loaded_version`` says of which version those in its folder are.

        Takes seconds to minutes; the caller holds the deadline. Raises ``ValueError`` for stop strings that can never
        be found.
        """
        if self.settings.sampling.stop:
            self._decode = await asyncio.to_thread(load_decode, self.settings.model_path, self.settings.sampling.stop)
        self._llm = await asyncio.to_thread(build_llm, self.settings, self._gauge if self.settings.pressure else None)
        if self.settings.loaded_version is not None:
            await self.llm.update_weight_version(str(self.settings.loaded_version))

    async def shutdown(self) -> None:
        """End the engine's processes. Safe to call twice."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, SHUTDOWN_SECONDS)

    @property
    def llm(self) -> AsyncLLM:
        """The running vLLM engine. Raises :class:`EngineError` before ``start`` and after ``shutdown``."""
        if self._llm is None:
            raise EngineError(f"{self.name} is not running")
        return self._llm

    async def check_health(self) -> None:
        """Return if the engine can serve. Raises :class:`EngineLostError` when vLLM has died."""
        if self.llm.errored:
            self._die(self.llm.dead_error)
        if self._leaving.startswith("lost"):
            raise EngineLostError(f"{self.name} is {self._leaving}")

    # -- generation -------------------------------------------------------------------------------------------------

    async def generate(self, rollouts: list[Rollout], sampling: Sampling | None = None) -> Returned:
        """Sample every rollout to its end, across any number of pushes, and return them in the order given.

        A rollout may arrive with tokens already sampled elsewhere; it continues from them. ``sampling`` is the engine's
        own unless given. A rollout whose requests stall again and again comes back with the reason ``failed``.
        """
        if self._leaving:
            return Returned(rollouts, self._leaving, frozenset(rollout.id for rollout in rollouts))
        call = _Call(sampling or self.settings.sampling, len(rollouts), untouched={rollout.id for rollout in rollouts})
        self._calls.append(call)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._finish(rollout, call)) for rollout in rollouts]
        finally:
            self._calls.remove(call)
            for rollout in rollouts:
                self._live.pop(rollout.id, None)
        done = [task.result() for task in tasks]
        left = frozenset(rollout.id for rollout in done if rollout.finish_reason is None)
        reason = call.leaving if left else ""
        return Returned(done, reason, left & call.untouched, counts=dict(call.counts))

    async def _finish(self, rollout: Rollout, call: _Call) -> Rollout:
        """The resume loop of one rollout; what is known of it is in ``_live`` at any time."""
        finished = await self._sample(rollout, call)
        self._live[rollout.id] = finished
        return finished

    async def _sample(self, rollout: Rollout, call: _Call) -> Rollout:
        """Submit, keep what came back, ask what is next."""
        stops = self._stop_matcher(call.sampling, rollout)
        start = call.sampling.turn_start
        # What arrives may have been sampled elsewhere, up to a stop string or across one.
        if stops is not None and (end := stops.feed(rollout.response_token_ids[start:])) is not None:
            rollout = rollout.first(start + end)
        self._live[rollout.id] = rollout
        resumed = len(rollout.response_token_ids) > start
        stalls = 0
        while not isinstance(
            decision := next_submission(call.sampling, rollout, stops is not None and stops.stopped), Finished
        ):
            if not await self._admitted(call):
                return rollout
            rollout = self._live[rollout.id] = replace(rollout, resumes=rollout.resumes + resumed)
            request = await self._submit(rollout.id, decision, call, stops)
            for segment in request.segments():
                rollout = rollout.extended(segment)
            self._live[rollout.id] = rollout
            resumed = True
            stalls = stalls + 1 if request.stalled else 0
            if stalls >= self.settings.rollout_tries:
                return replace(rollout, finish_reason="failed")
        return replace(rollout, finish_reason=decision.reason)

    def _stop_matcher(self, sampling: Sampling, rollout: Rollout) -> StopMatcher | None:
        if not sampling.stop:
            return None
        if self._decode is None:  # the engine's own sampling has no stop strings, but this call's has
            self._decode = load_decode(self.settings.model_path, sampling.stop)
        return StopMatcher(
            self._decode, sampling.stop, sampling.min_tokens - rollout.sampled_before(sampling.turn_start)
        )

    async def _admitted(self, call: _Call) -> bool:
        """Wait at the gate. False when the rollouts of the call are to be handed back instead."""
        while not call.leaving and not self._serving:
            await self._changed.wait()
        return not call.leaving

    def _look_again(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _submit(self, rollout_id: str, submission: Submission, call: _Call, stops: StopMatcher | None) -> Request:
        """One request to vLLM, from hand-in to its end, however that comes about."""
        from vllm.inputs.engine import tokens_input

        request = Request(f"{rollout_id}/{next(self._ids)}", stops)
        self._requests[rollout_id] = request
        call.submitted += 1
        call.untouched.discard(rollout_id)
        self._idle.clear()
        prompt = tokens_input(list(submission.prompt_token_ids))
        params = sampling_params(call.sampling, submission)
        try:
            await request.run(
                self.llm, prompt, params, self.settings.rollout_timeout, self._served_version, self.adapter
            )
            request.check_versions()
        except VersionMismatchError as error:
            raise EngineError(f"{self.name}: {error}") from error
        except Exception as error:
            if not self.llm.errored:
                raise
            self._die(error)
        finally:
            del self._requests[rollout_id]
            call.submitted -= 1
            if not self._requests:
                self._idle.set()
        self._generated += len(request.token_ids)
        call.counts["rollouts/stalled"] += request.stalled
        call.counts["tokens/cached"] += request.cached_tokens
        call.counts["tokens/surplus"] += request.surplus_tokens
        return request

    def _served_version(self) -> int:
        assert self.version is not None, "the gate opens only after a version is published"
        return self.version

    # -- leaving ----------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Take no rollouts any more; hand back all there are, with their tokens. Returns when that is done."""
        self._leaving = self._leaving or "drained"
        self._serving = False
        for call in self._calls:
            call.leaving = self._leaving
        self._look_again()
        async with asyncio.timeout(self.settings.pause_timeout):
            await self._abort_everything()

    async def release(self, count: int) -> int:
        """Hand back about ``count`` rollouts, those that came last, for another engine to finish.

        Whole calls leave, and only those that have nothing at vLLM: it is meant for a paused engine. Returns how many
        rollouts are leaving.
        """
        waiting = [call for call in self._calls if not call.submitted and not call.leaving]
        released = 0
        for call in reversed(waiting):
            if released >= count:
                break
            call.leaving = "moved"
            released += call.size
        self._look_again()
        return released

    def _die(self, error: BaseException) -> None:
        """vLLM is dead: hand everything back."""
        self._leaving = f"lost: {type(error).__name__}: {error}"
        self._serving = False
        for call in self._calls:
            call.leaving = self._leaving
        self._look_again()

    # -- pushes -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: PushMode = "abort", kv_cache: KvCache = "recompute") -> int:
        """Close the gate and stop generation. Returns the number of requests that were running or waiting.

        Mode ``abort`` returns only when every request has come back with its tokens; ``wait`` when each has run to its
        end; ``keep`` leaves them frozen inside vLLM. Pausing a paused engine does it again, with a warning. After a
        pause that was given up half-way the gate is closed, and a resume opens it. Raises ``TimeoutError`` after
        ``pause_timeout``, and :class:`EngineError` when a later pause or resume came while requests ran to their end.
        """
        self._latest = number = self._latest + 1
        drain = self.settings.drain_timeout if mode == "wait" else 0.0
        async with asyncio.timeout(self.settings.pause_timeout + drain), self._turn:
            if not self._serving and self.version is not None:
                logger.warning("%s is paused although it is paused already", self.name)
            self._serving = self._paused = False
            interrupted = len(self._requests)
            if mode == "keep":
                for request in self._requests.values():
                    request.hold()
                await self.llm.pause_generation(mode="keep", clear_cache=kv_cache == "recompute")
            else:
                if mode == "wait":
                    await self._all_ended(number)
                await self._abort_everything()
            self._paused = True
        return interrupted

    async def _all_ended(self, number: int) -> None:
        """Wait until every request has run to its end, or until something newer than pause ``number`` is asked for."""
        while self._requests and self._latest == number:
            await self._soon_idle()
        if self._latest != number:
            raise EngineError(f"{self.name}: a pause in mode wait has been overtaken by a later pause or resume")

    async def _abort_everything(self) -> None:
        """Abort until every request that was handed to vLLM has come back; its caches of old weights are dropped.

        A request that was on its way to the scheduler while the abort ran is caught by the next round (R11), so no
        grace period is needed.
        """
        await self.llm.pause_generation(mode="abort", clear_cache=True)
        while self._requests:
            await self._soon_idle()
            if self._requests:
                await self.llm.pause_generation(mode="abort", clear_cache=True)

    async def _soon_idle(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout=0.05)

    async def resume(self, version: int) -> None:
        """Open the gate: from now on new tokens are sampled from ``version``, unfinished rollouts first.

        Raises :class:`EngineError` when vLLM holds another version: an engine that missed a push must not serve.
        Resuming an engine that serves this version changes nothing, with a warning.
        """
        self._latest += 1
        async with self._turn:
            self._check_staying()
            await self._check_held(version)
            if self._serving:
                logger.warning("%s is resumed although it serves already", self.name)
            self._paused = False
            await self.llm.resume_generation()
            self._check_staying()  # it may have been drained meanwhile
            self.version = version
            for request in self._requests.values():
                request.go_on()
            self._serving = True
            self._look_again()

    def _check_staying(self) -> None:
        if self._leaving:
            raise EngineLostError(f"{self.name} cannot serve: it is {self._leaving}")

    async def start_weight_update(self) -> None:
        """Prepare for new weights. Raises :class:`EngineError` unless the engine is paused, or they are staged."""
        async with self._turn:
            if not self._paused and not self._staging:
                raise EngineError(f"{self.name}: a weight update was started, but the engine is not paused")
            await super().start_weight_update()

    async def load_adapter(self, version: int, files: AdapterFiles) -> None:
        """Compute with another adapter, see :meth:`WeightReceiver.load_adapter`, unless the engine is not paused."""
        async with self._turn:
            if not self._paused:
                raise EngineError(f"{self.name}: an adapter was to be loaded, but the engine is not paused")
            await super().load_adapter(version, files)

    async def swap(self, version: int) -> None:
        """Put the staged weights of ``version`` into the model. Raises :class:`EngineError` unless it is paused."""
        async with self._turn:
            if not self._paused:
                raise EngineError(f"{self.name}: staged weights were to be swapped in, but the engine is not paused")
            await self.finish_weight_update(str(version))

    async def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """Log-probabilities at temperature 1 of every token but the first, under the weights that the engine holds.

        The gate stays closed, so nothing else is computed; but vLLM itself is not paused any more, and the next update
        needs another pause. ``None`` while requests are frozen: vLLM schedules all requests or none, and these would
        sample on. Raises :class:`EngineError` if the engine serves, :class:`EngineLostError` if vLLM dies, and
        ``TimeoutError`` after ``pause_timeout``.
        """
        async with asyncio.timeout(self.settings.pause_timeout), self._turn:
            if self._serving:
                raise EngineError(f"{self.name} serves; it computes given sequences only between a pause and a resume")
            if self._requests:
                return None
            self._paused = False
            try:
                await self.llm.resume_generation()
                return await prompt_logprobs(self.llm, sequences, self.adapter)
            except Exception as error:
                if self.llm.errored:
                    self._die(error)
                    self._check_staying()
                raise

    # -- looking in -------------------------------------------------------------------------------------------------

    async def partial_rollouts(self) -> list[Rollout]:
        """Every rollout of the calls in flight with the tokens known so far, those that are finished included.

        Complete while paused. The engine serves on meanwhile, between one rollout and the next.
        """
        partial = []
        for rollout_id, before in list(self._live.items()):
            rollout, request = self._live.get(rollout_id, before), self._requests.get(rollout_id)
            for segment in request.certain_segments() if request is not None and rollout_id in self._live else ():
                rollout = rollout.extended(segment)
            partial.append(rollout)
            await asyncio.sleep(0)
        return partial

    async def stats(self) -> dict[str, float]:
        """Tokens generated since the start, and what is there now: rollouts in flight, requests at vLLM."""
        arriving = sum(len(request.token_ids) for request in self._requests.values())
        in_flight = sum(rollout.finish_reason is None for rollout in self._live.values())
        return {
            "generated_tokens": float(self._generated + arriving),
            "in_flight": float(in_flight),
            "submitted": float(len(self._requests)),
        }

    async def pressure(self) -> Pressure:
        """How full the KV cache was since the last call, and what was preempted; nothing unless that is counted."""
        return self._gauge.take()
