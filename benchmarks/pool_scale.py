"""What the driver pays for many rollouts in flight: CPU time per finished rollout, and per push.

    python -m benchmarks.pool_scale [--quick] [--repeat 3] [--json PATH]

64 simulated engines under the real engine pool, pusher, admission, batches and main loop; learner and rewards do
nothing. The engines live in a process of their own, whose virtual time passes whenever it has nothing to do. The CPU
time of this process is therefore the driver's; what the pipe between the two takes, which stands in for Ray, is timed
and given apart. Two measurements at each number in flight:

- the whole loop, from when as many rollouts are finished as are in flight, until ``--rollouts`` more are; there is a
  push after every 512 of them;
- pushes alone, with all rollouts handed in and none finishing, and the calls that a push makes to engines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import queue
import statistics
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.default_run import machine, table
from generator.pool import EnginePool, PoolSettings
from generator.resume import Sampling
from generator.rollout import Group, Prompt, Rollout, ScoredRollout
from generator.simulated import SimulatedEngine
from generator.simulated_stream import SimulatedSettings
from generator.virtual_time import VirtualTimeLoop
from trainer.admission import Admission
from trainer.config import BatchConfig, Config, SamplingConfig, StalenessConfig
from trainer.data import PromptStream
from trainer.loop import Parts, train
from weight_sync.push import Pusher
from weight_sync.simulated import SimulatedSender

ENGINES = 64
GROUP_SIZE = 4
BATCH_PROMPTS = 128
SAMPLING = Sampling(max_tokens=64, stop_token_ids=frozenset(range(20)))
PUSHES = 20


def host(pipe: Connection, settings: SimulatedSettings) -> None:
    """The process of the engines: makes one for every name that is called, and answers calls until the pipe closes."""
    engines: dict[str, SimulatedEngine] = {}
    loop = VirtualTimeLoop(wait_for_others=True)
    calls: set[asyncio.Task[None]] = set()
    answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def send() -> None:  # in a thread: were both ends to wait until the other one reads, they would for ever
        with contextlib.suppress(OSError):
            while True:
                pipe.send(answers.get())

    async def answer(number: int, name: str, method: str, arguments: tuple[Any, ...]) -> None:
        engine = engines.setdefault(name, SimulatedEngine(name, settings))
        answers.put((number, await getattr(engine, method)(*arguments)))

    def receive() -> None:
        while pipe.poll():
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                loop.stop()
                return
            task = loop.create_task(answer(*message))
            calls.add(task)
            task.add_done_callback(calls.discard)

    threading.Thread(target=send, daemon=True).start()
    loop.add_reader(pipe.fileno(), receive)
    loop.run_forever()


class Link:
    """An engine of the other process, as the pool sees it."""

    workers = 1

    def __init__(self, name: str, hosted: Hosted) -> None:
        self.name = name
        self.handle = self
        self._hosted = hosted

    def __getattr__(self, method: str) -> Any:
        return lambda *arguments: self._hosted.call(self.name, method, *arguments)

    def kill(self) -> None:
        """The process ends with all engines at once."""


class Hosted:
    """The driver's end of the pipe."""

    seconds = 0.0
    """CPU seconds that messages took, packing and unpacking included."""

    def __init__(self, pipe: Connection) -> None:
        self.calls = 0
        self._pipe = pipe
        self._open: dict[int, asyncio.Future[Any]] = {}
        asyncio.get_running_loop().add_reader(pipe.fileno(), self._receive)

    def call(self, name: str, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """Send a call; the future of its answer."""
        self.calls += 1
        answer = self._open[self.calls] = asyncio.get_running_loop().create_future()
        with metered():
            self._pipe.send((self.calls, name, method, arguments))
        return answer

    def _receive(self) -> None:
        """One answer at a time, as it comes; the loop calls again while there are more."""
        with metered():
            number, result = self._pipe.recv()
        answer = self._open.pop(number)
        if not answer.done():
            answer.set_result(result)


@contextlib.contextmanager
def metered() -> Iterator[None]:
    """Count the CPU time of what is inside as the pipe's."""
    started = time.thread_time()
    yield
    Hosted.seconds += time.thread_time() - started


def driver_seconds() -> float:
    """CPU seconds of this process, without the pipe."""
    return time.process_time() - Hosted.seconds


@asynccontextmanager
async def engines(max_running: int) -> AsyncIterator[tuple[EnginePool, Pusher, Hosted]]:
    """A started pool of engines with room for ``max_running`` rollouts each."""
    settings = SimulatedSettings(SAMPLING, max_running=max_running)
    context = multiprocessing.get_context("fork")  # a spawned one would import torch again, for seconds, each time
    ours, theirs = context.Pipe()
    process = context.Process(target=host, args=(theirs, settings), daemon=True)
    process.start()
    theirs.close()
    hosted = Hosted(ours)
    pool = EnginePool(lambda number: Link(f"engine {number}", hosted), PoolSettings(ENGINES))
    sender = SimulatedSender()

    async def connect() -> None:
        sender.connect([link.handle for link in await pool.take_members()])

    try:
        await pool.start()
        yield pool, Pusher(sender, pool, timeout=60.0, connect=connect), hosted
    finally:
        asyncio.get_running_loop().remove_reader(ours.fileno())
        process.kill()
        process.join()
        ours.close()


class Nothing:
    """Learner, rewards and watch of a run that only samples: notes the CPU time when so many rollouts are finished."""

    def __init__(self, warm_up: int, rollouts: int) -> None:
        self._marks = [warm_up, warm_up + rollouts]
        self._finished = 0
        self.seconds: list[tuple[float, float]] = []
        """CPU time of the driver and of the pipe at the marks."""
        self.done = asyncio.Event()

    async def train(self, rollouts: Any, version: int) -> dict[str, float]:
        return {}

    async def score(self, prompt: Prompt, rollouts: list[Rollout], texts: list[str]) -> tuple[ScoredRollout, ...]:
        return tuple(ScoredRollout(rollout, "", 1.0, {}) for rollout in rollouts)

    def finished(self, group: Group) -> None:
        self._finished += len(group.rollouts)
        while self._marks and self._finished >= self._marks[0]:
            self._marks.pop(0)
            self.seconds.append((driver_seconds(), Hosted.seconds))
        if not self._marks:
            self.done.set()

    def take_counts(self) -> dict[str, int]:
        return {"reward/excluded": 0}

    @property
    def trace(self) -> Nothing:
        return self

    def span(self, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext()

    def count(self, name: str, number: int) -> None:
        pass

    def push(self, record: Any) -> None:
        pass

    def step(self, *args: Any, **kwargs: Any) -> None:
        pass


async def measure_loop(in_flight: int, rollouts: int) -> tuple[float, float]:
    """CPU seconds of the driver, and of the pipe, per finished rollout, with ``in_flight`` of them at a time."""
    nothing: Any = Nothing(in_flight, rollouts)
    groups = in_flight // GROUP_SIZE
    versions = groups // BATCH_PROMPTS + 2
    config = Config(
        name="pool_scale",
        task="",
        steps=1_000_000,
        batch=BatchConfig(prompts=BATCH_PROMPTS),
        sampling=SamplingConfig(group_size=GROUP_SIZE),
        staleness=StalenessConfig(max_versions=versions),
    )
    async with engines(max_running=max(4, -(-in_flight // ENGINES))) as (pool, pusher, _):
        parts = Parts(
            config=config,
            prompts=PromptStream([Prompt(number, (1, 2, 3), "", {}) for number in range(10_000)], seed=0),
            engines=pool,
            rewards=nothing,
            decode=lambda ids: "",
            learner=nothing,
            pusher=pusher,
            admission=Admission(BATCH_PROMPTS, versions, groups),
            watch=nothing,
        )
        running = asyncio.create_task(train(parts))
        done = asyncio.create_task(nothing.done.wait())
        await asyncio.wait([running, done], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    begun, ended = nothing.seconds
    return (ended[0] - begun[0]) / rollouts, (ended[1] - begun[1]) / rollouts


async def measure_push(in_flight: int) -> tuple[float, float]:
    """CPU seconds of the driver per push, and calls to engines per push, with ``in_flight`` rollouts unfinished."""
    async with engines(max_running=0) as (pool, pusher, hosted):
        await pusher.push(0)
        groups = [[Rollout(f"{g}-{r}", (1, 2, 3)) for r in range(GROUP_SIZE)] for g in range(in_flight // GROUP_SIZE)]
        tasks = [asyncio.create_task(pool.generate(group)) for group in groups]
        await asyncio.sleep(0)
        await pusher.push(1)
        calls = hosted.calls
        seconds = []
        for version in range(2, PUSHES + 2):
            started = driver_seconds()
            await pusher.push(version)
            seconds.append(driver_seconds() - started)
            assert pool.interrupted == in_flight, "every rollout should have been in flight"
        calls = hosted.calls - calls
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return statistics.median(seconds), calls / PUSHES


def measure(sizes: list[int], rollouts: int, repeat: int) -> list[dict[str, Any]]:
    """A row of figures a size: medians of ``repeat`` measurements, taken in turns."""
    loops: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    pushes: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    gc.collect()
    gc.freeze()  # what was imported is not looked through again and again
    for _ in range(repeat):
        for size in sizes:
            gc.collect()
            loops[size].append(asyncio.run(measure_loop(size, rollouts)))
            gc.collect()
            pushes[size].append(asyncio.run(measure_push(size)))
    return [
        {
            "in_flight": size,
            "driver_us_per_rollout": 1e6 * statistics.median(driver for driver, _ in loops[size]),
            "fastest": 1e6 * min(driver for driver, _ in loops[size]),
            "slowest": 1e6 * max(driver for driver, _ in loops[size]),
            "pipe_us_per_rollout": 1e6 * statistics.median(pipe for _, pipe in loops[size]),
            "driver_ms_per_push": 1e3 * statistics.median(seconds for seconds, _ in pushes[size]),
            "calls_per_push": statistics.median(calls for _, calls in pushes[size]),
        }
        for size in sizes
    ]


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 and 1,000 in flight, 1,000 rollouts, once")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=20_000, help="finished rollouts that are measured")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        rows = measure([100, 1_000], rollouts=1_000, repeat=1)
    else:
        rows = measure([100, 1_000, 10_000], arguments.rollouts, arguments.repeat)
    first, last = rows[0], rows[-1]
    result = {
        "machine": machine(),
        "engines": ENGINES,
        "driver_cpu_ratio": last["driver_us_per_rollout"] / first["driver_us_per_rollout"],
        "push_cpu_ratio": last["driver_ms_per_push"] / first["driver_ms_per_push"],
        "runs": rows,
    }
    print(f"{result['machine']}; {ENGINES} simulated engines\n\n{table(rows)}\n")
    print(
        f"{last['in_flight']} against {first['in_flight']} in flight: {result['driver_cpu_ratio']:.2f} x the driver's "
        f"CPU time per finished rollout, {result['push_cpu_ratio']:.2f} x per push"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
