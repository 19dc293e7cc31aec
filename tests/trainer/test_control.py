"""The control socket, with parts that only have what it touches."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trainer import control
from trainer.admission import Admission
from trainer.checks import ConfigError
from trainer.concurrency import Concurrency
from trainer.config import Config
from trainer.control import SOCKET_FILE, apply, listening, main, request


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
    admission: Admission = field(default_factory=lambda: Admission(4, 1, 10, "mask_tokens"))
    concurrency: Concurrency = field(default_factory=lambda: Concurrency(10))
    place_freed: asyncio.Event = field(default_factory=asyncio.Event)
    steps_done: int = 4

    def check_resources(self, config: Config) -> None:
        if config.engine.count > 8:
            raise ConfigError("the run needs 9 GPUs")

    def running_limit(self, config: Config) -> int:
        return config.staleness.max_running_groups or 10 * config.engine.count


@pytest.fixture(autouse=True)
def patient(monkeypatch) -> None:
    """A request is a matter of a thread, which may have to wait."""
    monkeypatch.setattr(control, "REQUEST_SECONDS", 120.0)


async def ask(folder: Path, changes: object) -> dict:
    return await asyncio.to_thread(request, folder, changes, 120.0)


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


@pytest.mark.parametrize(("limit", "bounds"), [(0, [80, 20]), (10, [10, 10])])
async def test_as_many_groups_are_in_flight_as_the_engines_there_are_have_room_for(limit, bounds):
    parts = Parts()
    parts.config.staleness.max_running_groups = limit
    seen = []
    for count in (8, 2):
        parts.place_freed.clear()
        await apply(parts, {"engine.count": count})
        seen.append(parts.admission.max_running)
        assert parts.place_freed.is_set(), "who waits for a place looks again"
    assert seen == bounds


async def test_a_socket_that_a_killed_run_left_is_replaced(tmp_path):
    (tmp_path / SOCKET_FILE).write_text("left over")
    async with listening(Parts(), tmp_path):
        assert (await ask(tmp_path, {}))["step"] == 4


async def test_a_client_that_says_nothing_is_answered_and_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "REQUEST_SECONDS", 0.01)
    async with listening(Parts(), tmp_path):
        reader, writer = await asyncio.open_unix_connection(tmp_path / SOCKET_FILE)
        assert b"no request came within 0.01 s" in await reader.readline()
        assert await reader.read() == b""
        writer.close()


@dataclass
class NeverReady(Engines):
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def set_count(self, count: int) -> None:
        self.asked.set()
        await asyncio.Event().wait()


async def command(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["control", *arguments])
    return await asyncio.to_thread(main)


async def test_a_run_that_ends_before_it_answers_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    engines = NeverReady()
    async with listening(Parts(engines=engines), tmp_path):
        asking = asyncio.create_task(command(monkeypatch, str(tmp_path), "engine.count=2"))
        await engines.asked.wait()
    assert await asking == 1
    assert capsys.readouterr().err == f"the run in {tmp_path} has ended before it answered\n"
    assert len(asyncio.all_tasks()) == 1, "nothing goes on answering"


async def test_a_folder_in_which_no_run_listens_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    left_over = socket.socket(socket.AF_UNIX)
    left_over.bind(str(tmp_path / SOCKET_FILE))
    left_over.close()
    for folder in (tmp_path, tmp_path / "nothing"):
        assert await command(monkeypatch, str(folder)) == 1
        assert capsys.readouterr().err.startswith(f"no run listens in {folder}")


async def test_a_run_that_does_not_answer_in_time_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(control, "request", lambda *_: request(tmp_path, {"engine.count": 2}, timeout=0.01))
    async with listening(Parts(engines=NeverReady()), tmp_path):
        assert await command(monkeypatch, str(tmp_path), "engine.count=2") == 1
    assert capsys.readouterr().err.startswith(f"the run in {tmp_path} has not answered")
