"""What the driver pays for many rollouts in flight: CPU time per finished rollout, and per push.

    python -m benchmarks.pool_scale [--quick] [--repeat 5] [--json PATH]

The real engine pool, pusher, admission, batches and main loop over 64 engines that sample nothing but the token stream
of a simulated engine; learner and rewards do nothing. The engines' work is timed and taken off, what is left is the
driver's, event loop and garbage collection included; the messages of a real engine actor are not. Two measurements at
each number in flight:

- the whole loop, from when as many rollouts are finished as are in flight, until ``--rollouts`` more are; there is a
  push after every 512 of them;
- pushes alone, with all rollouts in flight and none finishing, and the calls that a push makes to engines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import random
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import machine, table, write_json
from generator import virtual_time
from generator.link import Returned
from generator.pool import EnginePool
from generator.pressure import Pressure
from generator.resume import Sampling
from generator.rollout import Group, Prompt, Rollout, ScoredRollout, Segment
from generator.simulated_stream import SimulatedSettings, whole_stream
from tests.pools import pool_settings_for
from trainer.admission import Admission
from trainer.collector import relax_collector
from trainer.config import BatchConfig, Config, SamplingConfig, StalenessConfig
from trainer.data import PromptStream
from trainer.episodes import SingleTurn
from trainer.loop import Parts, train
from trainer.step_metrics import StepResult
from weight_sync.push import Pusher
from weight_sync.simulated import SimulatedSender

ENGINES = 64
GROUP_SIZE = 4
BATCH_PROMPTS = 128
STOPS = frozenset(range(20))
SAMPLING = Sampling(max_tokens=64, stop_token_ids=STOPS)
STREAM = SimulatedSettings(SAMPLING)
GROUPS_PER_TURN = 4
"""How many groups end at a turn of the event loop, whatever the number in flight."""
PUSHES = 20
SCALE = [100, 1_000, 10_000]
"""Rollouts in flight that are compared."""
QUICK_SCALE = SCALE[:2]


class Engines:
    """The engines' side: holds every call, finishes some when the event loop comes round, and times its own work.

    Much lighter than :class:`generator.simulated.SimulatedEngine`, whose work and whose objects, which the garbage
    collector looks through, would weigh on the driver's figures; the tokens are the same.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """CPU seconds of this thread that the engines took, garbage collections not counted."""
        self.calls = 0
        self.waiting: list[tuple[LightEngine, list[Rollout], asyncio.Future[Returned]]] = []
        self._chance = random.Random(0)
        self._collecting = 0.0
        self._collected = 0.0
        gc.callbacks.append(self._garbage)

    def driver_seconds(self) -> float:
        """CPU seconds of this thread, without the engines', up to now."""
        return time.thread_time() - self.seconds

    async def finish_some(self) -> None:
        """For ever: finish groups at random, some at each turn of the event loop."""
        while True:
            await asyncio.sleep(0)
            started, collected = time.thread_time(), self._collected
            for _ in range(min(GROUPS_PER_TURN, len(self.waiting))):
                index = self._chance.randrange(len(self.waiting))
                self.waiting[index], self.waiting[-1] = self.waiting[-1], self.waiting[index]
                engine, rollouts, answer = self.waiting.pop()
                if not answer.done():
                    answer.set_result(Returned([engine.sample(rollout) for rollout in rollouts]))
            self.seconds += time.thread_time() - started - (self._collected - collected)

    def close(self) -> None:
        """Stop listening to the garbage collector."""
        gc.callbacks.remove(self._garbage)

    def _garbage(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.thread_time()
        else:
            self._collected += time.thread_time() - self._collecting


class LightEngine:
    """A :class:`generator.link.EngineLink` that answers at once, but for ``generate``."""

    workers = 1

    def __init__(self, name: str, engines: Engines) -> None:
        self.name = name
        self.handle = self
        self._engines = engines
        self._version = 0

    def sample(self, rollout: Rollout) -> Rollout:
        ids, logprobs = zip(*whole_stream(STREAM, SAMPLING, rollout), strict=True)
        return rollout.extended(Segment(ids, logprobs, self._version), "stop" if ids[-1] in STOPS else "length")

    async def generate(self, rollouts: list[Rollout], sampling: Sampling | None = None) -> Returned:
        answer: asyncio.Future[Returned] = asyncio.get_running_loop().create_future()
        self._engines.waiting.append((self, rollouts, answer))
        return await answer

    async def pause(self, *arguments: Any) -> int:
        self._engines.calls += 1
        return 0

    async def load(self, *arguments: Any) -> None:
        self._engines.calls += 1

    async def swap(self, version: int) -> None: ...

    async def confirm(self, *arguments: Any) -> None:
        self._engines.calls += 1

    async def prompt_logprobs(self, sequences: Any) -> None:
        self._engines.calls += 1

    async def resume(self, version: int) -> None:
        self._engines.calls += 1
        self._version = version

    async def release(self, count: int) -> int:
        self._engines.calls += 1
        return 0

    async def drain(self) -> None: ...

    async def partial_rollouts(self) -> list[Rollout]:
        return []

    async def pressure(self) -> Pressure:
        return Pressure()

    async def start(self) -> None: ...

    async def check_health(self) -> None: ...

    async def shutdown(self) -> None: ...

    def kill(self) -> None: ...


@asynccontextmanager
async def pool_of(engines: Engines) -> AsyncIterator[tuple[EnginePool, Pusher]]:
    """A started pool of light engines, and its pusher."""
    pool = EnginePool(lambda number: LightEngine(f"engine {number}", engines), pool_settings_for(ENGINES))
    sender = SimulatedSender()

    async def connect() -> None:
        sender.connect([link.handle for link in await pool.take_members()])

    try:
        await pool.start()
        yield pool, Pusher(sender, pool, timeout=60.0, connect=connect)
    finally:
        await pool.shutdown()
        engines.close()


class Nothing:
    """Learner, rewards and watch of a run that only samples: notes the CPU time when so many rollouts are finished."""

    def __init__(self, engines: Engines, warm_up: int, rollouts: int) -> None:
        self._engines = engines
        self._marks = [warm_up, warm_up + rollouts]
        self._finished = 0
        self.seconds: list[float] = []
        """The driver's CPU time at the marks."""
        self.done = asyncio.Event()

    async def train(self, rollouts: Any, version: int) -> StepResult:
        return StepResult({})

    async def score(self, prompt: Prompt, rollouts: list[Rollout], texts: list[str]) -> tuple[ScoredRollout, ...]:
        return tuple(ScoredRollout(rollout, "", 1.0, {}) for rollout in rollouts)

    def finished(self, group: Group) -> None:
        self._finished += len(group.rollouts)
        while self._marks and self._finished >= self._marks[0]:
            self._marks.pop(0)
            self.seconds.append(self._engines.driver_seconds())
        if not self._marks:
            self.done.set()

    def take_counts(self) -> dict[str, int]:
        return {}

    @property
    def trace(self) -> Nothing:
        return self

    ended = 0

    def open_spans(self) -> list[Any]:
        return []

    def span(self, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext()

    def count(self, name: str, number: int) -> None:
        pass

    def push(self, record: Any) -> None:
        pass

    def step(self, *args: Any, **kwargs: Any) -> None:
        pass


async def measure_loop(in_flight: int, rollouts: int) -> float:
    """CPU seconds of the driver per finished rollout, with ``in_flight`` of them at a time."""
    engines = Engines()
    nothing: Any = Nothing(engines, in_flight, rollouts)
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
    async with pool_of(engines) as (pool, pusher):
        parts = Parts(
            config=config,
            prompts=PromptStream([Prompt(number, (1, 2, 3), "", {}) for number in range(10_000)], seed=0),
            engines=pool,
            episodes=SingleTurn(pool, nothing, lambda ids: "", nothing),
            learner=nothing,
            pusher=pusher,
            admission=Admission(BATCH_PROMPTS, versions, groups, "mask_tokens"),
            watch=nothing,
        )
        finishing = asyncio.create_task(engines.finish_some())
        running = asyncio.create_task(train(parts))
        done = asyncio.create_task(nothing.done.wait())
        await asyncio.wait([running, done], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        for task in (running, finishing):
            task.cancel()
        await asyncio.gather(running, finishing, return_exceptions=True)
    begun, ended = nothing.seconds
    return float(ended - begun) / rollouts


async def measure_push(in_flight: int) -> tuple[float, float]:
    """CPU seconds of the driver per push, and calls to engines per push, with ``in_flight`` rollouts unfinished."""
    engines = Engines()
    async with pool_of(engines) as (pool, pusher):
        await pusher.push(0)
        groups = [[Rollout(f"{g}-{r}", (1, 2, 3)) for r in range(GROUP_SIZE)] for g in range(in_flight // GROUP_SIZE)]
        tasks = [asyncio.create_task(pool.generate(group)) for group in groups]
        await asyncio.sleep(0)
        assert len(engines.waiting) == len(groups), "every group should be in flight"
        calls = engines.calls
        seconds = []
        for version in range(1, PUSHES + 1):
            started = engines.driver_seconds()
            await pusher.push(version)
            seconds.append(engines.driver_seconds() - started)
        calls = engines.calls - calls
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return statistics.median(seconds), calls / PUSHES


def measure(sizes: list[int], rollouts: int, repeat: int) -> dict[str, Any]:
    """A row a size, medians of ``repeat`` measurements taken in turns, and how the last size compares to the first.

    The ratios are medians over the turns, not ratios of medians: a machine that changes its speed between turns, as
    shared ones do by half, changes both sizes of a turn.
    """
    loops: dict[int, list[float]] = {size: [] for size in sizes}
    pushes: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    relax_collector()  # as in a run
    for _ in range(repeat):
        for size in sizes:
            gc.collect()
            loops[size].append(virtual_time.run(measure_loop(size, rollouts)))
            gc.collect()
            pushes[size].append(virtual_time.run(measure_push(size)))
    rows = [
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
    first, last = sizes[0], sizes[-1]
    push_seconds = {size: [seconds for seconds, _ in pushes[size]] for size in (first, last)}
    return {
        "driver_cpu_ratio": _ratio(loops[last], loops[first]),
        "push_cpu_ratio": _ratio(push_seconds[last], push_seconds[first]),
        "runs": rows,
    }


def _ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(above, below, strict=True))


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 and 1,000 in flight, 1,000 rollouts, once")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=20_000, help="finished rollouts that are measured")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        measured = measure(QUICK_SCALE, rollouts=1_000, repeat=1)
    else:
        measured = measure(SCALE, arguments.rollouts, arguments.repeat)
    result = {"machine": machine(), "engines": ENGINES, **measured}
    rows = measured["runs"]
    print(f"{result['machine']}; {ENGINES} engines without a model\n\n{table(rows)}\n")
    print(
        f"{rows[-1]['in_flight']} against {rows[0]['in_flight']} in flight: {result['driver_cpu_ratio']:.2f} x the "
        f"driver's CPU time per finished rollout, {result['push_cpu_ratio']:.2f} x per push"
    )
    write_json(arguments.json, result)


if __name__ == "__main__":
    main()
