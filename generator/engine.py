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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from generator.launch import EngineSettings, build_llm, sampling_params
from generator.link import EngineError, EngineLostError, KvCache, PushMode, Returned
from generator.orphan import announce_parent
from generator.prestart import prestart_core
from generator.request import Request, VersionMismatchError
from generator.resume import Finished, Sampling, Submission, next_submission
from generator.rollout import Rollout
from generator.stops import Decode, StopMatcher, load_decode

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

COUNTERS = ("generated_tokens", "surplus_tokens", "cached_tokens", "stalled", "relabelled")
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
    requests: dict[str, Request] = field(default_factory=dict)
    """Those at vLLM now, by the rollout's id."""


class Engine:
    """A vLLM engine with a gate. Meant to live in an actor; every method but the constructor is a coroutine."""

    def __init__(self, settings: EngineSettings) -> None:
        os.environ.update(settings.environment)
        announce_parent()
        if settings.prestart_core:
            prestart_core()
        self.settings = settings
        self.version: int | None = None
        self._llm: AsyncLLM | None = None
        self._mode: PushMode = "abort"
        self._serving = False
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
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._decode: Decode | None = None
        self._manifest: tuple[tuple[str, str, tuple[int, ...]], ...] = ()

    # -- lifetime ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model. Takes seconds to minutes; the caller holds the deadline.

        Raises ``ValueError`` for stop strings that can never be found.
        """
        if self.settings.sampling.stop:
            self._decode = await asyncio.to_thread(load_decode, self.settings.model_path, self.settings.sampling.stop)
        self._llm = await asyncio.to_thread(build_llm, self.settings)

    async def shutdown(self) -> None:
        """End the engine's processes. Safe to call twice."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, SHUTDOWN_SECONDS)

    @property
    def llm(self) -> AsyncLLM:
        """The running vLLM engine. Raises :class:`EngineError` before ``start`` and after ``shutdown``."""
        if self._llm is None:
            raise EngineError(f"{self.settings.name} is not running")
        return self._llm

    async def check_health(self) -> None:
        """Return if the engine can serve. Raises :class:`EngineLostError` when vLLM has died."""
        if self.llm.errored:
            self._die(self.llm.dead_error)
        if self._leaving.startswith("lost"):
            raise EngineLostError(f"{self.settings.name} is {self._leaving}")

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
        return Returned(done, call.leaving if left else "", left & call.untouched)

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
        self._requests[rollout_id] = call.requests[rollout_id] = request
        call.untouched.discard(rollout_id)
        self._idle.clear()
        prompt = tokens_input(list(submission.prompt_token_ids))
        params = sampling_params(call.sampling, submission)
        try:
            await request.run(self.llm, prompt, params, self.settings.rollout_timeout, self._served_version)
            self._counts["relabelled"] += request.check_versions(may_differ=self._mode == "keep")
        except VersionMismatchError as error:
            raise EngineError(f"{self.settings.name}: {error}") from error
        except Exception as error:
            if not self.llm.errored:
                raise
            self._die(error)
        finally:
            del self._requests[rollout_id], call.requests[rollout_id]
            if not self._requests:
                self._idle.set()
        self._counts["generated_tokens"] += len(request.token_ids)
        self._counts["surplus_tokens"] += request.surplus_tokens
        self._counts["cached_tokens"] += request.cached_tokens
        self._counts["stalled"] += request.stalled
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
        waiting = [call for call in self._calls if not call.requests and not call.leaving]
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
        end; ``keep`` leaves them frozen inside vLLM. Pausing a paused engine does it again, with a warning.
        """
        if not self._serving and self.version is not None:
            logger.warning("%s is paused although it is paused already", self.settings.name)
        self._serving = False
        self._mode = mode
        interrupted = len(self._requests)
        drain = self.settings.drain_timeout if mode == "wait" else 0.0
        async with asyncio.timeout(self.settings.pause_timeout + drain):
            if mode == "keep":
                for request in self._requests.values():
                    request.hold()
                await self.llm.pause_generation(mode="keep", clear_cache=kv_cache == "recompute")
                return interrupted
            if mode == "wait":
                await self._idle.wait()
            await self._abort_everything()
        return interrupted

    async def _abort_everything(self) -> None:
        """Abort until every request that was handed to vLLM has come back; its caches of old weights are dropped.

        A request that was on its way to the scheduler while the abort ran is caught by the next round (R11), so no
        grace period is needed.
        """
        await self.llm.pause_generation(mode="abort", clear_cache=True)
        while self._requests:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout=0.05)
            if self._requests:
                await self.llm.pause_generation(mode="abort", clear_cache=True)

    async def resume(self, version: int) -> None:
        """Open the gate: from now on new tokens are sampled from ``version``, unfinished rollouts first.

        Raises :class:`EngineError` when vLLM holds another version: an engine that missed a push must not serve.
        Resuming an engine that serves this version changes nothing, with a warning.
        """
        if self._leaving:
            raise EngineLostError(f"{self.settings.name} cannot serve: it is {self._leaving}")
        held = await self.llm.get_weight_version()
        if held != str(version):
            raise EngineError(f"{self.settings.name} holds weights {held!r} and cannot serve version {version}")
        if self._serving:
            logger.warning("%s is resumed although it serves already", self.settings.name)
        self.version = version
        await self.llm.resume_generation()
        for request in self._requests.values():
            request.go_on()
        self._serving = True
        self._look_again()

    async def confirm(self, version: int, manifest: tuple[tuple[str, str, tuple[int, ...]], ...]) -> None:
        """Confirm that ``version`` arrived completely: same names, dtypes and shapes as the learner sent."""
        if self._manifest != manifest:
            raise EngineError(
                f"{self.settings.name} received {len(self._manifest)} tensors for version {version}, the learner sent "
                f"{len(manifest)}; the update is incomplete"
            )
        held = await self.llm.get_weight_version()
        if held != str(version):
            raise EngineError(f"{self.settings.name} confirms weights {held!r} instead of version {version}")

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """vLLM's weight-transfer handshake; a new group replaces the one of an earlier handshake."""
        await self.llm.shutdown_weight_transfer_engine()
        await self.llm.init_weight_transfer_engine(request)

    async def start_weight_update(self) -> None:
        """Prepare the model for new weights. The engine must be paused."""
        if self._serving:
            raise EngineError(f"{self.settings.name}: a weight update was started while the engine serves")
        self._manifest = ()
        await self.llm.start_weight_update()

    async def update_weights(self, request: Any) -> None:
        """Receive the weights that ``request`` announces."""
        await self.llm.update_weights(request)
        info = request.update_info
        self._manifest = tuple(
            (name, dtype, tuple(shape))
            for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
        )

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Load what was received into the running model and label it."""
        await self.llm.finish_weight_update(weight_version)

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
        """Counters since the start: tokens generated, tokens cut behind a stop string, prompt tokens found in the
        prefix cache, requests that stalled, tokens whose version tag vLLM corrected; and what is there now: rollouts
        in flight, requests at vLLM.
        """
        arriving = sum(len(request.token_ids) for request in self._requests.values())
        stats = {name: float(count) for name, count in self._counts.items()}
        stats["generated_tokens"] += arriving
        in_flight = sum(rollout.finish_reason is None for rollout in self._live.values())
        return stats | {"in_flight": float(in_flight), "submitted": float(len(self._requests))}

    async def prompt_logprobs(self, sequences: list[tuple[int, ...]]) -> list[list[float]]:
        """Log-probabilities at temperature 1 of each sequence's tokens after the first, under the held weights."""
        return [await self._prompt_logprobs(sequence) for sequence in sequences]

    async def _prompt_logprobs(self, sequence: tuple[int, ...]) -> list[float]:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        result: list[float] = []
        async for output in self.llm.generate(tokens_input(list(sequence)), params, f"canary/{next(self._ids)}"):
            if output.prompt_logprobs:
                entries = zip(sequence[1:], output.prompt_logprobs[1:], strict=True)
                result = [entry[token_id].logprob for token_id, entry in entries]
        return result
