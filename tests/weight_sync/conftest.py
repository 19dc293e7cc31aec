"""One real vLLM engine for all tests of proofs, staged pushes and deltas: each of them leaves it fit to serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
import torch

from tests.brake import FUNCTIONS_IN_THE_WORKER
from tests.tiny import CONTEXT, EVERY, engine_settings, tiny_llama


@pytest.fixture(scope="session")
def model() -> torch.nn.Module:
    return tiny_llama(1)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def started(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Any, Any]]:
    """The engine, and what it computes before anything was pushed into it."""
    from generator.engine import Engine
    from generator.resume import Sampling

    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)  # type: ignore[operator]
    sampling = Sampling(max_tokens=CONTEXT - 20, temperature=0.0, max_model_len=CONTEXT)
    settings = engine_settings(folder, sampling, running=4)
    engine = Engine(replace(settings, environment=settings.environment | FUNCTIONS_IN_THE_WORKER))
    await engine.start()
    yield engine, await engine.prompt_logprobs(EVERY.sequences)
    await engine.shutdown()


@pytest.fixture(scope="session")
def engine(started: tuple[Any, Any]) -> Any:
    return started[0]


@pytest.fixture(scope="session")
def logprobs_before_any_push(started: tuple[Any, Any]) -> Any:
    """Of the sequences of :data:`tests.tiny.EVERY`; by the time of a test, others have pushed into the engine."""
    return started[1]
