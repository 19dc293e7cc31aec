"""The control socket, with parts that only have what it touches."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trainer.checks import ConfigError
from trainer.config import Config
from trainer.control import SOCKET_FILE, apply, listening, request


@dataclass
class Engines:
    count: int = 1
    serving: int = 1
    version: int = 4

    async def set_count(self, count: int) -> None:
        self.count = self.serving = count


@dataclass
class Parts:
    config: Config = field(default_factory=lambda: Config(name="test", task="test", steps=9))
    engines: Engines = field(default_factory=Engines)
    weights: asyncio.Lock = field(default_factory=asyncio.Lock)
    steps_done: int = 4

    def check_resources(self, config: Config) -> None:
        if config.engine.count > 8:
            raise ConfigError("the run needs 9 GPUs")


async def ask(folder: Path, changes: object) -> dict:
    return await asyncio.to_thread(request, folder, changes, 10.0)


async def test_a_run_answers_in_its_folder_even_if_the_path_is_longer_than_a_socket_s_name_may_be(tmp_path):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    parts = Parts()
    async with listening(parts, folder):
        assert (folder / SOCKET_FILE).stat().st_mode & 0o777 == 0o600
        assert await ask(folder, {}) == {
            "step": 4, "steps": 9, "policy_version": 4, "engine.count": 1, "engines_serving": 1,
        }  # fmt: skip
        assert (await ask(folder, {"engine.count": 3}))["engines_serving"] == 3
        assert (await ask(folder, {"engine.count": 1}))["engines_serving"] == 1
    assert not (folder / SOCKET_FILE).exists()
    with pytest.raises(FileNotFoundError):
        await ask(folder, {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine.count": 0}, "at least 1"),
        ({"engine.count": 9}, "needs 9 GPUs"),
        ({"engine.count": "two"}, "whole number"),
        ({"engine.count": True}, "whole number"),
        ({"steps": 3}, "cannot be changed in a running run; what can: engine.count"),
        ([1], "cannot be changed"),
    ],
)
async def test_what_cannot_be_is_refused_and_changes_nothing(tmp_path, changes, words):
    parts = Parts()
    async with listening(parts, tmp_path):
        assert words in (await ask(tmp_path, changes))["error"]
    assert parts.engines.count == 1


async def test_engines_leave_only_between_pushes(tmp_path):
    parts = Parts(engines=Engines(count=3))
    async with parts.weights:
        leaving = asyncio.create_task(apply(parts, {"engine.count": 2}))
        await asyncio.sleep(0.01)
        assert parts.engines.count == 3
    assert (await leaving)["engine.count"] == 2


async def test_a_socket_that_a_killed_run_left_is_replaced(tmp_path):
    (tmp_path / SOCKET_FILE).write_text("left over")
    async with listening(Parts(), tmp_path):
        assert (await ask(tmp_path, {}))["step"] == 4
