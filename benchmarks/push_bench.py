"""A learner and one real engine, and what can be measured between the two processes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks import push_worker
from generator.engine import Engine
from generator.link import PushMode
from generator.rollout import Rollout
from tests.tiny import ModuleLearner, OneEngine
from weight_sync.buckets import pack, plan_buckets
from weight_sync.group import GlooGroup, send_buckets
from weight_sync.push import Pusher
from weight_sync.source import DeepSpeedSource
from weight_sync.staging import StagingDevice

IN_FLIGHT = 32
PROMPT_TOKENS = 16
TOKENS_BEFORE = 4
"""Tokens of each rollout before a push comes."""
MANY_TOKENS, ONE_TOKENS = 48, 96
"""Response tokens of a rollout among many, and of one alone: it must not end before the gate closes."""
CALL_SECONDS = 120.0
"""What any one wait may take."""
LOOK_SECONDS = 0.001


class Bench:
    """One engine, one learner, and what is measured between them."""

    def __init__(self, engine: Engine, model: Any, bucket_bytes: int) -> None:
        self.engine, self.model, self.bucket_bytes = engine, model, bucket_bytes
        self.vocabulary = int(model.config.vocab_size)
        self.side = OneEngine(engine)
        self.use(staged=False)
        self.source = DeepSpeedSource(model, bucket_bytes=bucket_bytes)
        self.version = -1

    def use(self, staged: bool) -> None:
        """Push so from now on. The next push builds a transfer group: an engine is told there where weights arrive."""
        staging: StagingDevice | None = "device" if staged else None
        self.learner = ModuleLearner(self.model, self.engine, bucket_bytes=self.bucket_bytes, staging=staging)
        self.pusher = Pusher(self.learner, self.side, timeout=CALL_SECONDS, drain_timeout=CALL_SECONDS, staged=staged)

    async def push(self) -> tuple[float, float]:
        """One push; when its gate began to close, and when it was over."""
        self.version += 1
        report = await self.pusher.push(self.version)
        over = time.monotonic()
        return over - report.pause_seconds, over

    @property
    def group(self) -> GlooGroup:
        """The transfer group of the last push."""
        assert self.learner._sender is not None
        group: GlooGroup = self.learner._sender._engine._group
        return group

    # -- the wire ---------------------------------------------------------------------------------------------------

    async def raw(self) -> float:
        """Seconds of one broadcast of as many bytes as a push has."""
        size = self.source.manifest().total_bytes
        memory = torch.ones(size, dtype=torch.uint8)
        return await self._sent(lambda: self.group.wait(self.group.broadcast(memory)), push_worker.take_one, size)

    async def transfer(self) -> float:
        """Seconds of all buckets of a push, packed before the clock starts."""
        buckets = self._packed()
        sizes = [bucket.numel() for bucket in buckets]
        return await self._sent(lambda: send_buckets(self.group, buckets), push_worker.take_buckets, sizes)

    async def reload(self) -> float:
        """Seconds of vLLM's own reload of tensors that are in the worker's memory. A push has to follow."""
        await self.engine.pause()
        announcement = self.source.manifest().to_wire()
        taking = asyncio.create_task(self._in_worker(push_worker.reload_alone, announcement, self.bucket_bytes))
        await asyncio.to_thread(send_buckets, self.group, self._packed())
        return await taking

    def _packed(self) -> list[torch.Tensor]:
        stream = iter(self.source)
        return [
            pack([next(stream)[1] for _ in bucket])
            for bucket in plan_buckets(self.source.manifest(), self.bucket_bytes)
        ]

    async def _sent(self, send: Callable[[], Any], receive: Callable[..., float], *arguments: Any) -> float:
        """Seconds from both sides being ready to the last byte's arrival."""

        def run() -> float:
            started = push_worker.meet(self.group)
            send()
            return started

        taking = asyncio.create_task(self._in_worker(receive, *arguments))
        started = await asyncio.wait_for(asyncio.to_thread(run), CALL_SECONDS)
        return await taking - started

    async def _in_worker(self, function: Callable[..., float], *arguments: Any) -> float:
        (answer,) = await self.engine.llm.collective_rpc(function, timeout=CALL_SECONDS, args=arguments)
        return float(answer)

    # -- the push ---------------------------------------------------------------------------------------------------

    async def whole_push(self, mode: PushMode) -> float:
        """Seconds from the closing of the gate to the first new token, with one rollout and nothing else to do.

        In mode ``wait`` that rollout comes while the gate is closed, so nothing has to run to its end.
        """
        self.side.mode = mode
        before = await self._generated()
        if mode == "wait":
            pushing = asyncio.create_task(self.push())
            await self._until_closed(pushing)
            sampling = self._sample(1, ONE_TOKENS)
        else:
            sampling = self._sample(1, ONE_TOKENS)
            await self._reach(before + TOKENS_BEFORE)
            pushing = asyncio.create_task(self.push())
        closed, _ = await pushing
        await self._reach(await self._generated() + 1)
        seconds = time.monotonic() - closed
        await _given_up(sampling)
        return seconds

    async def restart(self) -> float:
        """The same as :meth:`whole_push` of mode ``abort`` with nothing pushed: the gate is closed and opened again."""
        before = await self._generated()
        sampling = self._sample(1, ONE_TOKENS)
        await self._reach(before + TOKENS_BEFORE)
        closed = time.monotonic()
        await self.engine.pause()
        await self.engine.resume(self.version)
        await self._reach(await self._generated() + 1)
        seconds = time.monotonic() - closed
        await _given_up(sampling)
        return seconds

    async def staged_stall(self) -> float:
        """The same as :meth:`stall` of mode ``abort``, of a staged push."""
        self.use(staged=True)
        await self.push()
        try:
            return await self.stall("abort")
        finally:
            self.use(staged=False)
            await self.push()

    async def stall(self, mode: PushMode) -> float:
        """Seconds of the longest gap in the token stream around a push, with :data:`IN_FLIGHT` rollouts."""
        self.side.mode = mode
        before = await self._generated()
        batches = [self._sample(IN_FLIGHT, MANY_TOKENS)]
        arrivals = asyncio.create_task(self._arrivals())
        await self._reach(before + IN_FLIGHT * TOKENS_BEFORE)
        pushing = asyncio.create_task(self.push())
        if mode == "wait":  # the others run to their end; these wait at the gate
            await self._until_closed(pushing)
            batches.append(self._sample(IN_FLIGHT, MANY_TOKENS))
        closed, opened = await pushing
        await self._reach(await self._generated() + 2 * IN_FLIGHT)
        arrivals.cancel()
        times = await arrivals
        last = max((moment for moment in times if moment <= closed), default=closed)
        around = [moment for moment in times if last <= moment]
        first = next(moment for moment in around if moment > opened)
        around = around[: around.index(first) + 1]
        await _given_up(*batches)
        return max(later - earlier for earlier, later in itertools.pairwise(around))

    def _sample(self, count: int, tokens: int) -> asyncio.Task[Any]:
        sampling = replace(self.engine.settings.sampling, max_tokens=tokens, min_tokens=tokens)
        prompts = torch.randint(3, self.vocabulary, (count, PROMPT_TOKENS)).tolist()
        rollouts = [Rollout(str(number), tuple(prompt)) for number, prompt in enumerate(prompts)]
        return asyncio.create_task(self.engine.generate(rollouts, sampling))

    async def _generated(self) -> float:
        return (await self.engine.stats())["generated_tokens"]

    async def _reach(self, tokens: float) -> None:
        async with asyncio.timeout(CALL_SECONDS):
            while await self._generated() < tokens:  # noqa: ASYNC110 (there is no such event)
                await asyncio.sleep(LOOK_SECONDS)

    async def _until_closed(self, pushing: asyncio.Task[Any]) -> None:
        """Wait until the gate is closed by a push that was just begun."""
        while self.engine._serving and not pushing.done():  # noqa: ASYNC110 (there is no such event)
            await asyncio.sleep(LOOK_SECONDS)

    async def _arrivals(self) -> list[float]:
        """When tokens arrived, until this is cancelled."""
        times, seen = [], await self._generated()
        try:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                if (now := await self._generated()) > seen:
                    times.append(time.monotonic())
                    seen = now
        except asyncio.CancelledError:
            return times


async def _given_up(*sampling: asyncio.Task[Any]) -> None:
    """What was to be seen of these rollouts has been: their requests end."""
    for task in sampling:
        task.cancel()
    await asyncio.wait(sampling, timeout=CALL_SECONDS)
