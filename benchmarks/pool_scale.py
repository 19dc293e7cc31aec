"""What the driver pays for many rollouts in flight: CPU time per finished rollout, and per push.

    python -m benchmarks.pool_scale [--quick] [--repeat 5] [--json PATH]

Simulated engines in virtual time, 64 of them, under the real engine pool, pusher, admission, batches and main loop;
learner and rewards do nothing. Engines run in the driver's thread here, so every step of theirs is timed and taken
off: what is left is the driver's share, the event loop included. Two measurements at each number in flight:

- the whole loop, from when the first generation of rollouts is done until ``--rollouts`` more are finished, a push
  after every 512 of them;
- pushes alone, with all rollouts in flight and none finishing, and the calls that a push makes to engines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import statistics
import time
from collections.abc import Coroutine, Generator
from pathlib import Path
from typing import Any

from benchmarks.default_run import machine, table
from generator import virtual_time
from generator.pool import EnginePool, PoolSettings
from generator.resume import Sampling
from generator.rollout import Group, Prompt, Rollout, ScoredRollout
from generator.simulated import SimulatedEngine, SimulatedSettings
from trainer.admission import Admission
from trainer.config import BatchConfig, Config, SamplingConfig, StalenessConfig
from trainer.data import PromptStream
from trainer.loop import Parts, train
from weight_sync.push import Pusher
from weight_sync.simulated import SimulatedSender

ENGINES = 64
GROUP_SIZE = 4
BATCH_PROMPTS = 128
MAX_TOKENS = 64
PUSHES = 20


class Meter:
    """CPU seconds of this thread that were spent inside engines."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def step(self) -> Generator[None]:
        started = time.thread_time()
        try:
            yield
        finally:
            self.seconds += time.thread_time() - started

    def driver(self) -> float:
        """CPU seconds of this thread outside engines, up to now."""
        return time.thread_time() - self.seconds


class Metered:
    """A coroutine of an engine, each step of it on the meter."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], meter: Meter) -> None:
        self._coroutine = coroutine
        self._meter = meter

    def __await__(self) -> Generator[Any, Any, Any]:
        try:
            while True:
                try:
                    with self._meter.step():
                        future = self._coroutine.send(None)
                except StopIteration as stop:
                    return stop.value
                yield future
        finally:
            self._coroutine.close()


class MeteredEngine(SimulatedEngine):
    """A simulated engine whose work is on the meter."""

    def __init__(self, name: str, settings: SimulatedSettings, meter: Meter) -> None:
        super().__init__(name, settings)
        self._meter = meter

    def _end_due(self) -> None:
        with self._meter.step():
            super()._end_due()

    async def generate(self, *arguments: Any) -> Any:
        return await Metered(super().generate(*arguments), self._meter)

    async def pause(self, *arguments: Any) -> Any:
        return await Metered(super().pause(*arguments), self._meter)

    async def load(self, *arguments: Any) -> Any:
        return await Metered(super().load(*arguments), self._meter)

    async def resume(self, *arguments: Any) -> Any:
        return await Metered(super().resume(*arguments), self._meter)


class Nothing:
    """Learner, rewards and watch of a run that only samples. Ends the run after so many rollouts."""

    def __init__(self, meter: Meter, warm_up: int, rollouts: int) -> None:
        self._meter = meter
        self._marks = [warm_up, warm_up + rollouts]
        self._finished = 0
        self.seconds: list[float] = []
        """The driver's clock at the marks."""
        self.done = asyncio.Event()

    async def train(self, rollouts: Any, version: int) -> dict[str, float]:
        return {}

    async def score(self, prompt: Prompt, rollouts: list[Rollout], texts: list[str]) -> tuple[ScoredRollout, ...]:
        return tuple(ScoredRollout(rollout, "", 1.0, {}) for rollout in rollouts)

    def finished(self, group: Group) -> None:
        self._finished += len(group.rollouts)
        while self._marks and self._finished >= self._marks[0]:
            self._marks.pop(0)
            self.seconds.append(self._meter.driver())
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


def make_pool(meter: Meter, in_flight: int, token_seconds: float) -> tuple[EnginePool, Pusher, list[MeteredEngine]]:
    """A pool with room for ``in_flight`` rollouts, its pusher, and the list in which its engines will be."""
    settings = SimulatedSettings(
        Sampling(max_tokens=MAX_TOKENS, stop_token_ids=frozenset(range(20))),
        max_running=max(4, -(-in_flight // ENGINES)),
        token_seconds=token_seconds,
    )
    engines: list[MeteredEngine] = []

    def make(number: int) -> MeteredEngine:
        engines.append(MeteredEngine(f"engine {number}", settings, meter))
        return engines[-1]

    pool = EnginePool(make, PoolSettings(count=ENGINES, max_running=settings.max_running))
    sender = SimulatedSender()

    async def connect() -> None:
        sender.connect([link.handle for link in await pool.take_members()])

    return pool, Pusher(sender, pool, timeout=60.0, connect=connect), engines


async def measure_loop(in_flight: int, rollouts: int) -> float:
    """CPU seconds of the driver per finished rollout, with ``in_flight`` of them at a time."""
    meter = Meter()
    pool, pusher, _ = make_pool(meter, in_flight, token_seconds=0.02)
    nothing: Any = Nothing(meter, in_flight, rollouts)
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
    await pool.start()
    running = asyncio.create_task(train(parts))
    done = asyncio.create_task(nothing.done.wait())
    await asyncio.wait([running, done], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await pool.shutdown()
    begun, ended = nothing.seconds
    return (ended - begun) / rollouts


async def measure_push(in_flight: int) -> tuple[float, float]:
    """CPU seconds of the driver per push, and calls to engines per push, with ``in_flight`` rollouts unfinished."""
    meter = Meter()
    pool, pusher, engines = make_pool(meter, in_flight, token_seconds=1e6)
    await pool.start()
    await pusher.push(0)
    groups = [[Rollout(f"{g}-{r}", (1, 2, 3)) for r in range(GROUP_SIZE)] for g in range(in_flight // GROUP_SIZE)]
    tasks = [asyncio.create_task(pool.generate(group)) for group in groups]
    await asyncio.sleep(1.0)
    calls = sum(engine.called.total() for engine in engines)
    seconds = []
    for version in range(1, PUSHES + 1):
        started = meter.driver()
        await pusher.push(version)
        seconds.append(meter.driver() - started)
        assert pool.interrupted == in_flight, "every rollout should have been in flight"
    calls = sum(engine.called.total() for engine in engines) - calls
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await pool.shutdown()
    return statistics.median(seconds), calls / PUSHES


def measure(sizes: list[int], rollouts: int, repeat: int) -> list[dict[str, Any]]:
    """A row of figures a size: medians of ``repeat`` measurements, taken in turns."""
    loops: dict[int, list[float]] = {size: [] for size in sizes}
    pushes: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    for _ in range(repeat):
        for size in sizes:
            gc.collect()
            loops[size].append(virtual_time.run(measure_loop(size, rollouts)))
            gc.collect()
            pushes[size].append(virtual_time.run(measure_push(size)))
    return [
        {
            "in_flight": size,
            "driver_us_per_rollout": 1e6 * statistics.median(loops[size]),
            "fastest": 1e6 * min(loops[size]),
            "slowest": 1e6 * max(loops[size]),
            "driver_ms_per_push": 1e3 * statistics.median(seconds for seconds, _ in pushes[size]),
            "calls_per_push": statistics.median(calls for _, calls in pushes[size]),
        }
        for size in sizes
    ]


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 and 1,000 in flight, 1,000 rollouts, once")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=10_000, help="finished rollouts that are measured")
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
        f"{last['in_flight']} against {first['in_flight']} in flight: {result['driver_cpu_ratio']:.2f} x the driver's"
    )
    print(f"CPU time per finished rollout, {result['push_cpu_ratio']:.2f} x per push")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
