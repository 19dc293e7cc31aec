"""A brake for a real engine: so many steps at full speed, and then so slow that no test comes too late.

An engine of a tiny model samples a whole response in less time than a busy machine may keep a test waiting. A test
that has to come in the middle of one, with a push for example, brakes the engine first: nothing then depends on how
quick the test is.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

FUNCTIONS_IN_THE_WORKER = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""In the environment of an engine: with it a function can be run in vLLM's worker, to look at it or to change it."""
ANY_NUMBER = 1 << 60


def _slow_after(worker: Any, steps: int, seconds: float) -> None:
    """In vLLM's worker: from now on each step behind the next ``steps`` takes ``seconds`` more."""
    worker.quick_steps, worker.slow_seconds = steps, seconds
    if "execute_model" in vars(worker):
        return
    execute_model = worker.execute_model

    def braked(scheduled: Any) -> Any:
        if scheduled.total_num_scheduled_tokens:
            worker.quick_steps -= 1
            if worker.quick_steps < 0:
                time.sleep(worker.slow_seconds)
        return execute_model(scheduled)

    worker.execute_model = braked


@contextlib.asynccontextmanager
async def braked(engine: Any, steps: int, seconds: float = 0.2) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """``engine`` makes ``steps`` steps at full speed, and each further one takes ``seconds`` more.

    A step brings a token to each request that runs. What the context gives lets it make ``steps`` quick ones again. At
    the end of the context the brake is off.
    """

    async def go_on() -> None:
        await engine.llm.collective_rpc(_slow_after, args=(steps, seconds))

    await go_on()
    try:
        yield go_on
    finally:
        await engine.llm.collective_rpc(_slow_after, args=(ANY_NUMBER, 0.0))


async def begun(engine: Any, count: int) -> None:
    """Wait until ``count`` of the rollouts in flight, finished ones included, have a token."""
    async with asyncio.timeout(120):
        while True:  # there is no such event
            partial = await engine.partial_rollouts()
            if sum(bool(rollout.response_token_ids) for rollout in partial) >= count:
                return
            await asyncio.sleep(0.002)
