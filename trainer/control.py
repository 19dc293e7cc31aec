"""Changes to a run that is going on: ``python -m trainer.control RUN_DIR engine.count=3``.

The run listens on a Unix socket in its run folder, which only its user can open. One request is one line of JSON, an
object of keys to change; the answer is one line of JSON, what the run looks like afterwards or ``error``. An empty
object changes nothing and just asks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checks import ConfigError, check

if TYPE_CHECKING:
    from trainer.loop import Parts

logger = logging.getLogger(__name__)

SOCKET_FILE = "control.sock"
REQUEST_SECONDS = 10.0
"""Seconds that a client has for its one line."""
CHANGEABLE = ("engine.count",)
"""The keys that a running run can change."""


@contextlib.asynccontextmanager
async def listening(parts: Parts, run_dir: str | Path) -> AsyncIterator[None]:
    """Answer requests for as long as the context lasts. One that is not answered by then never is."""
    answering: set[asyncio.Task[Any]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        answering.add(task)
        try:
            writer.write(json.dumps(await _reply(parts, reader)).encode() + b"\n")
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        finally:
            answering.discard(task)
            writer.close()

    with _short_path(run_dir) as path:
        path.unlink(missing_ok=True)  # of a run that was killed
        server = await asyncio.start_unix_server(answer, path)
        path.chmod(0o600)
    async with server:
        try:
            yield
        finally:
            (Path(run_dir) / SOCKET_FILE).unlink(missing_ok=True)
            unanswered = list(answering)
            for task in unanswered:
                task.cancel()
            await asyncio.gather(*unanswered, return_exceptions=True)


async def _reply(parts: Parts, reader: asyncio.StreamReader) -> dict[str, Any]:
    """The answer to the request that ``reader`` brings within ``REQUEST_SECONDS``."""
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            line = await reader.readline()
    except TimeoutError:
        return {"error": f"no request came within {REQUEST_SECONDS:g} s; it is one line of JSON"}
    except ValueError as error:  # longer than a request can be
        return {"error": str(error)}
    try:
        return await apply(parts, json.loads(line))
    except (ValueError, TypeError, RuntimeError) as error:
        return {"error": str(error)}


async def apply(parts: Parts, changes: Any) -> dict[str, Any]:
    """Change what ``changes`` names; what the run looks like now. Raises ``ConfigError`` for what cannot be."""
    if not isinstance(changes, dict) or (unknown := [key for key in changes if key not in CHANGEABLE]):
        wrong = f"`{unknown[0]}`" if isinstance(changes, dict) else "this"
        raise ConfigError(f"{wrong} cannot be changed in a running run; what can: {', '.join(CHANGEABLE)}")
    if "engine.count" in changes:
        await _set_engine_count(parts, changes["engine.count"])
    return {
        "step": parts.steps_done,
        "steps": parts.config.steps,
        "policy_version": parts.engines.version,
        "engine.count": parts.engines.count,
        "engines_serving": parts.engines.serving,
    }


async def _set_engine_count(parts: Parts, count: Any) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise ConfigError(f"`engine.count={count}`: the value must be a whole number")
    wanted = replace(parts.config, engine=replace(parts.config.engine, count=count))
    check(wanted)
    parts.check_resources(wanted)
    logger.warning("engine.count is %d from now on, it was %d", count, parts.engines.count)
    try:
        if count > parts.engines.count:
            await parts.engines.set_count(count)  # takes as long as an engine's start: the run goes on meanwhile
        else:
            async with parts.weights:  # no engine leaves in the middle of a push
                await parts.engines.set_count(count)
    finally:  # of several engines some may have come
        parts.admission.max_running = parts.concurrency.resize(parts.running_limit(wanted))
        parts.place_freed.set()


@contextlib.contextmanager
def _short_path(run_dir: str | Path) -> Iterator[Path]:
    """The socket's path by way of an open folder: the name of a Unix socket may have 107 characters at most."""
    folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{folder}/{SOCKET_FILE}")
    finally:
        os.close(folder)


def request(run_dir: str | Path, changes: dict[str, Any], timeout: float = 1800.0) -> dict[str, Any]:
    """Send ``changes`` to the run in ``run_dir`` and return its answer.

    Raises ``FileNotFoundError``, ``NotADirectoryError`` or ``ConnectionRefusedError`` when no run listens there,
    another ``ConnectionError`` when it ends before it has answered, ``TimeoutError`` after ``timeout`` seconds.
    """
    with socket.socket(socket.AF_UNIX) as connection, _short_path(run_dir) as path:
        connection.settimeout(timeout)
        connection.connect(str(path))
        connection.sendall(json.dumps(changes).encode() + b"\n")
        line = connection.makefile().readline()
    if not line.endswith("\n"):
        raise ConnectionResetError("the run has ended before it answered")
    answer: dict[str, Any] = json.loads(line)
    return answer


def main() -> int:
    """The command. Exit codes: 0 done, 1 the run refused or did not answer, 2 a malformed command line."""
    parser = argparse.ArgumentParser(prog="python -m trainer.control", description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", help="the run folder of a run that is going on")
    parser.add_argument("changes", nargs="*", metavar="key=value", help=f"what to change: {', '.join(CHANGEABLE)}")
    arguments = parser.parse_args()
    try:
        changes = {key: json.loads(value) for key, value in (change.split("=", 1) for change in arguments.changes)}
    except ValueError:
        parser.error(f"changes are written key=value with a number as the value, not {arguments.changes}")
    try:
        answer = request(arguments.run_dir, changes)
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        sys.stderr.write(f"no run listens in {arguments.run_dir}: it has ended, or has not started its engines yet\n")
        return 1
    except ConnectionError:
        sys.stderr.write(f"the run in {arguments.run_dir} has ended before it answered\n")
        return 1
    except TimeoutError:
        sys.stderr.write(f"the run in {arguments.run_dir} has not answered; what was asked for may still happen\n")
        return 1
    sys.stdout.write("".join(f"{key:<16} {value}\n" for key, value in answer.items()))
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main())
