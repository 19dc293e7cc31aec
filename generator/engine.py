"""One vLLM engine: the only module that knows vLLM's generation interface.

The resume loop runs here, next to vLLM's ``AsyncLLM``, so that a push with thousands of requests in flight costs no
round trips through the driver. An engine serves only while its gate is open; the gate opens when a version is
published and closes when a push begins. Nothing is ever submitted to a paused vLLM engine (R10).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from generator.orphan import announce_parent
from generator.prestart import prestart_core, quick_imports, use_prestarted_core
from generator.resume import Finished, Sampling, Submission, next_submission
from generator.rollout import Rollout, Segment

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 1.0
"""How long vLLM's processes may take to end before they are killed: they hold nothing that must be saved."""


class EngineError(RuntimeError):
    """An engine did something that breaks an invariant, or died. The message names the engine."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine needs to start. Sizes in tokens unless the name says otherwise."""

    name: str
    model_path: str
    dtype: str
    sampling: Sampling
    max_model_len: int
    max_running: int
    transfer_backend: str
    seed: int = 0
    tensor_parallel: int = 1
    enforce_eager: bool = False
    gpu_memory_utilization: float = 0.85
    kv_cache_bytes: int | None = None
    rollout_timeout: float = 900.0
    pause_timeout: float = 120.0
    trust_remote_code: bool = False
    block_size: int | None = None
    """Tokens of a KV-cache block, the grain at which prompts are shared; ``None``: vLLM chooses."""
    executor: str | None = None
    """vLLM's ``distributed_executor_backend``; ``None``: vLLM chooses."""
    prestart_core: bool = False
    """Whether the engine core's imports run beside the engine's, see ``generator.prestart``."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables set before vLLM is imported, for example the cores of a CPU engine."""


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
        self._gate = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._submitted: set[str] = set()
        self._live: dict[str, Rollout] = {}
        self._ids = itertools.count()
        self._generated = 0
        self._manifest: tuple[tuple[str, str, tuple[int, ...]], ...] = ()

    # -- lifetime ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model. Takes seconds to minutes; the caller holds the deadline."""
        self._llm = await asyncio.to_thread(_build_llm, self.settings)

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

    # -- generation -------------------------------------------------------------------------------------------------

    async def generate(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Sample every rollout to its end, across any number of pushes, and return them in the order given.

        A rollout may arrive with tokens already sampled elsewhere; it continues from them. Raises
        :class:`EngineError` when a rollout goes ``rollout_timeout`` seconds without a new token or vLLM dies.
        """
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._finish(rollout)) for rollout in rollouts]
        return [task.result() for task in tasks]

    async def _finish(self, rollout: Rollout) -> Rollout:
        """The resume loop of one rollout: submit, keep what came back, ask what is next."""
        self._live[rollout.id] = rollout
        submissions = 0
        try:
            while not isinstance(decision := next_submission(self.settings.sampling, rollout), Finished):
                await self._gate.wait()
                version = self.version
                assert version is not None, "the gate opens only after a version is published"
                resumes = rollout.resumes + (submissions > 0)
                segment = await self._submit(rollout.id, decision, version)
                rollout = replace(rollout.extended(segment), resumes=resumes)
                self._live[rollout.id] = rollout
                submissions += 1
            return replace(rollout, finish_reason=decision.reason)
        finally:
            del self._live[rollout.id]

    async def _submit(self, rollout_id: str, submission: Submission, version: int) -> Segment:
        """One request to vLLM, from hand-in to its end (natural or aborted), as a segment of ``version``."""
        request_id = f"{rollout_id}/{next(self._ids)}"
        self._submitted.add(request_id)
        self._idle.clear()
        token_ids: list[int] = []
        logprobs: list[float] = []
        try:
            async for output in self._outputs(request_id, submission):
                completion = output.outputs[0]
                token_ids.extend(completion.token_ids)
                self._generated += len(completion.token_ids)
                for token_id, entry in zip(completion.token_ids, completion.logprobs or (), strict=True):
                    logprobs.append(entry[token_id].logprob)
                if output.finished:
                    self._check_versions(request_id, completion.weight_versions, len(token_ids), version)
        finally:
            self._submitted.discard(request_id)
            if not self._submitted:
                self._idle.set()
        return Segment(tuple(token_ids), tuple(logprobs), version)

    async def _outputs(self, request_id: str, submission: Submission) -> AsyncIterator[Any]:
        """vLLM's outputs of one request; each has ``rollout_timeout`` seconds to arrive."""
        from vllm.inputs.engine import tokens_input

        limit = self.settings.rollout_timeout
        loop = asyncio.get_running_loop()
        stream = self.llm.generate(
            tokens_input(list(submission.prompt_token_ids)),
            _sampling_params(self.settings.sampling, submission),
            request_id,
        )
        try:
            async with asyncio.timeout(limit) as deadline:
                async for output in stream:
                    deadline.reschedule(loop.time() + limit)
                    yield output
        except TimeoutError as error:
            raise EngineError(
                f"{self.settings.name}: request {request_id} went {limit:.0f} s without a new token "
                "(engine.rollout_timeout)"
            ) from error

    def _check_versions(self, request_id: str, spans: Any, count: int, version: int) -> None:
        """Our tag must agree with the label vLLM recorded for the tokens (invariant 2)."""
        if count and {span.version for span in spans or ()} != {str(version)}:
            raise EngineError(
                f"{self.settings.name}: request {request_id} was tagged with version {version}, but vLLM sampled it "
                f"with {spans}"
            )

    # -- pushes -----------------------------------------------------------------------------------------------------

    async def pause(self) -> int:
        """Close the gate and abort everything that was handed to vLLM. Returns the number of requests aborted.

        Returns only when every request has come back with its tokens: a request that was on its way to the scheduler
        while the abort ran is caught by the next round (R11), so no grace period is needed.
        """
        self._gate.clear()
        aborted = len(self._submitted)
        async with asyncio.timeout(self.settings.pause_timeout):
            await self.llm.pause_generation(mode="abort", clear_cache=True)
            while self._submitted:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._idle.wait(), timeout=0.05)
                if self._submitted:
                    await self.llm.pause_generation(mode="abort", clear_cache=True)
        return aborted

    async def resume(self, version: int) -> None:
        """Open the gate: from now on new tokens are sampled from ``version``, unfinished rollouts first.

        Raises :class:`EngineError` when vLLM holds another version: an engine that missed a push must not serve.
        """
        held = await self.llm.get_weight_version()
        if held != str(version):
            raise EngineError(f"{self.settings.name} holds weights {held!r} and cannot serve version {version}")
        self.version = version
        await self.llm.resume_generation()
        self._gate.set()

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
        if self._gate.is_set():
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
        """The rollouts in flight with the tokens known so far. Complete while paused."""
        return list(self._live.values())

    async def stats(self) -> dict[str, float]:
        """Counters of this engine: tokens generated since start, rollouts in flight, requests at vLLM."""
        return {
            "generated_tokens": float(self._generated),
            "in_flight": float(len(self._live)),
            "submitted": float(len(self._submitted)),
            "time": time.monotonic(),
        }

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


def _sampling_params(sampling: Sampling, submission: Submission) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=submission.max_tokens,
        min_tokens=submission.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        # Every end-of-sequence id is in stop_token_ids, so vLLM's own choice of one of them must not interfere.
        ignore_eos=True,
        stop_token_ids=sorted(sampling.stop_token_ids),
        logprobs=0,
        detokenize=False,
        # Deltas leave the engine as they are sampled: they are what survives its death.
        output_kind=RequestOutputKind.DELTA,
    )


def _build_llm(settings: EngineSettings) -> AsyncLLM:
    with quick_imports():
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

    if settings.prestart_core:
        use_prestarted_core()
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_running,
        "tensor_parallel_size": settings.tensor_parallel,
        "enforce_eager": settings.enforce_eager,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "trust_remote_code": settings.trust_remote_code,
        # Log-probabilities of the distribution that was sampled from, not of the raw logits (L5).
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "weight_transfer_config": WeightTransferConfig(backend=settings.transfer_backend),
    }
    if settings.kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = settings.kv_cache_bytes
    if settings.block_size is not None:
        arguments["block_size"] = settings.block_size
    if settings.executor is not None:
        arguments["distributed_executor_backend"] = settings.executor
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
