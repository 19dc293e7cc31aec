"""What failing rollouts cost a run: the staleness bound under them, and the throughput, in virtual time.

    python -m benchmarks.flow [--steps 2000] [--failing 0.2] [--json PATH]

The real loop, admission, buffer, engine pool and pusher over simulated engines and a simulated learner, twice: once
with every rollout coming to its end, once with a share of them failing somewhere on their way. Response lengths have a
heavy tail (Pareto, cut at the budget). The engines are what the learner waits for.

``token_rate`` is trained tokens per second of virtual time. A run with failing rollouts can do no better than a run
without, times the share of its sampled tokens that are of use (those of a failed rollout are not); ``efficiency`` is
its token rate over that. ``stale`` counts trained tokens past the bound, and must be 0. Nothing here depends on the
speed of the machine: the same arguments give the same figures.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import table, write_json
from generator import virtual_time
from generator.pool import EnginePool
from generator.resume import Sampling
from generator.rollout import Group, Prompt
from generator.simulated import SimulatedEngine
from generator.simulated_stream import SimulatedSettings
from tests.pools import pool_settings_for
from tests.trainer import loop_doubles
from trainer.admission import Admission
from trainer.config import BatchConfig, Config, SamplingConfig, StalenessConfig
from trainer.data import PromptStream
from trainer.episodes import SingleTurn
from trainer.loop import Parts, train
from trainer.step_metrics import StepResult
from weight_sync.push import Pusher
from weight_sync.simulated import SimulatedSender

ENGINES, ENGINE_ROOM = 2, 8
BATCH_PROMPTS, GROUP_SIZE, MAX_VERSIONS = 4, 4, 4
ROWS = 1_000
TAIL, SHORTEST, MAX_TOKENS = 1.3, 8, 400
TOKEN_SECONDS, STEP_SECONDS, PUSH_SECONDS = 0.02, 0.4, 0.02


class Learner:
    """Takes its time for a step, and looks at every token it is given."""

    def __init__(self, max_versions: int) -> None:
        self._max_versions = max_versions
        self.steps = self.trained = self.stale = self.oldest = 0

    async def train(self, rollouts: Sequence[Any], version: int) -> StepResult:
        await asyncio.sleep(STEP_SECONDS)
        for rollout in rollouts:
            ages = [version - v for v, seen in zip(rollout.versions, rollout.loss_mask, strict=True) if seen]
            self.trained += len(ages)
            self.stale += sum(age > self._max_versions for age in ages)
            self.oldest = max(self.oldest, *ages, 0)
        self.steps += 1
        return StepResult({})


class Watch(loop_doubles.Watch):
    """Counts tokens, and keeps nothing else of a long run."""

    failed = 0

    def finished(self, group: Group) -> None:
        super().finished(group)
        self.failed += sum(item.rollout.finish_reason == "failed" for item in group.rollouts)

    def step(self, step: int, metrics: Any, groups: Sequence[Group], advantages: Any, *, version: int) -> None:
        scored = [item.rollout for group in groups for item in group.rollouts if item.reward is not None]
        self.count("tokens/expired", sum(one.sampled_tokens - sum(one.loss_mask) for one in scored))


async def flow(steps: int, failing: float) -> dict[str, Any]:
    """A run of so many steps with this share of failing rollouts; its figures."""
    sampling = Sampling(max_tokens=MAX_TOKENS, stop_token_ids=frozenset({0}))
    settings = SimulatedSettings(
        sampling, max_running=ENGINE_ROOM, token_seconds=TOKEN_SECONDS, start_seconds=1.0,
        tail=TAIL, shortest=SHORTEST, failing=failing,
    )  # fmt: skip
    pool = EnginePool(
        lambda number: SimulatedEngine(f"engine {number}", settings),
        pool_settings_for(ENGINES, max_running=ENGINE_ROOM),
    )
    sender = SimulatedSender(seconds=PUSH_SECONDS)

    async def connect() -> None:
        sender.connect([link.handle for link in await pool.take_members()])

    learner, watch = Learner(MAX_VERSIONS), Watch()
    doubles: Any = {"learner": learner, "watch": watch}
    await pool.start()
    parts = Parts(
        config=Config(
            name="flow",
            task="",
            steps=steps,
            batch=BatchConfig(prompts=BATCH_PROMPTS),
            sampling=SamplingConfig(group_size=GROUP_SIZE),
            staleness=StalenessConfig(max_versions=MAX_VERSIONS),
        ),
        prompts=PromptStream([Prompt(number, (1, 2, 3), "", {}) for number in range(ROWS)], seed=0),
        engines=pool,
        episodes=SingleTurn(pool, loop_doubles.Rewards(), lambda ids: "", watch),
        pusher=Pusher(sender, pool, timeout=60.0, connect=connect),
        admission=Admission(BATCH_PROMPTS, MAX_VERSIONS, 1_000, "mask_tokens", total_groups=steps * BATCH_PROMPTS),
        **doubles,
    )
    began = asyncio.get_running_loop().time()
    await train(parts)
    seconds = asyncio.get_running_loop().time() - began
    await pool.shutdown()
    return {
        "failing": failing,
        "steps": learner.steps,
        "virtual_seconds": seconds,
        "rollouts_failed": watch.failed,
        "tokens_sampled": watch.generated,
        "tokens_trained": learner.trained,
        "tokens_expired": watch.counts.get("tokens/expired", 0),
        "oldest": learner.oldest,
        "stale": learner.stale,
        "token_rate": learner.trained / seconds,
    }


def measure(steps: int, failing: float) -> dict[str, Any]:
    """The figures of both runs, and what the second makes of what it could."""
    calm, rough = (virtual_time.run(flow(steps, share)) for share in (0.0, failing))
    useful = [run["tokens_trained"] / run["tokens_sampled"] for run in (calm, rough)]
    efficiency = rough["token_rate"] / (calm["token_rate"] * useful[1] / useful[0])
    return {"max_versions": MAX_VERSIONS, "efficiency": efficiency, "runs": [calm, rough]}


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--failing", type=float, default=0.2, help="share of the rollouts that fail")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.steps, arguments.failing)
    print(f"{table(result['runs'])}\n\nefficiency: {result['efficiency']:.3f}")
    write_json(arguments.json, result)


if __name__ == "__main__":
    main()
