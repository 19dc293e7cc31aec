"""What an interrupted run says when it can keep nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from trainer.checkpoint_folder import STATE_FILE, checkpoint_path
from trainer.config import Config, ShutdownConfig
from trainer.run import save_on_interrupt


class SilentEngines:
    """They never tell what they are sampling."""

    async def partial_rollouts(self, limit: float) -> list:
        await asyncio.Event().wait()
        return []


@pytest.mark.parametrize(
    ("steps", "says"),
    [((), r"The run has no earlier one"), ((3, 12), r"The same command with run_dir=.* continues from step_12")],
)
async def test_an_interrupt_that_can_write_no_checkpoint_says_why_and_where_the_run_goes_on(tmp_path, steps, says):
    for step in steps:
        path = checkpoint_path(tmp_path, step)
        path.mkdir(parents=True)
        (path / STATE_FILE).write_text("{}")
    config = Config(shutdown=ShutdownConfig(timeout=0.05))
    parts = SimpleNamespace(config=config, engines=SilentEngines(), watch=SimpleNamespace(run_dir=tmp_path))
    training = asyncio.create_task(asyncio.sleep(0))
    with pytest.raises(RuntimeError, match=r"not within 0.05 s \(shutdown.timeout\)\. " + says):
        await save_on_interrupt(parts, training)
