"""Parts with the methods of the real ones and no model behind them: for tests of the loop."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from generator.rollout import Group, Prompt, Rollout, ScoredRollout, Segment
from trainer.admission import Admission
from trainer.config import BatchConfig, Config, SamplingConfig, StalenessConfig
from trainer.data import PromptStream
from trainer.episodes import SingleTurn
from trainer.loop import Parts
from trainer.step_metrics import StepResult
from weight_sync.push import PushReport, Step


@dataclass
class Engines:
    """Samples one token per tick; rollouts take different times and go on under the version of the moment."""

    version: int = 0
    interrupted: int = 0
    error_after: int | None = None
    calls: int = 0
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    counts: dict[str, int] = field(default_factory=dict)
    serving: int = 1
    count: int = 1
    random: random.Random = field(default_factory=lambda: random.Random(0))

    async def generate(self, rollouts: list[Rollout], sampling: Any = None) -> list[Rollout]:
        self.calls += 1
        if self.error_after is not None and self.calls > self.error_after:
            raise RuntimeError("the engine broke")
        for _ in range(self.random.randrange(1, 12)):
            await asyncio.sleep(0)
            rollouts = [rollout.extended(Segment((5,), (-1.0,), self.version)) for rollout in rollouts]
        return [replace(rollout, finish_reason="stop") for rollout in rollouts]


@dataclass
class Rewards:
    """Every second rollout is right; ``broken`` scores nothing; of ``flat`` prompts all rollouts are right."""

    broken: bool = False
    flat: Callable[[Prompt], bool] = lambda prompt: False

    async def score(
        self, prompt: Prompt, rollouts: Sequence[Rollout], texts: Sequence[str]
    ) -> tuple[ScoredRollout, ...]:
        assert len(texts) == len(rollouts)
        flat = self.flat(prompt)
        rewards = [None if self.broken else float(flat or number % 2) for number in range(len(rollouts))]
        return tuple(ScoredRollout(r, t, reward, {}) for r, t, reward in zip(rollouts, texts, rewards, strict=True))

    def take_counts(self) -> dict[str, int]:
        return {"reward/failed": 8 * self.broken}


@dataclass
class Learner:
    """Remembers what it trained on, and checks the staleness bound on every token that the loss sees."""

    bound: int
    batches: list[Any] = field(default_factory=list)
    parts: list[Any] = field(default_factory=list)
    """What it began with of the batch that is being filled."""
    began: int = 0
    """How often it began with a part."""
    skips: frozenset[int] = frozenset()
    """Versions at which an update is skipped."""

    async def kl_penalties(self, rollouts: Any) -> list[float]:
        """As if only every second rollout had left the reference."""
        await asyncio.sleep(0)
        return [0.5 * (number % 2) for number, _ in enumerate(rollouts)]

    async def accumulate(self, rollouts: Any, version: int) -> None:
        """A step on a part takes a while, in which others may finish."""
        assert version == len(self.batches)
        self.parts += rollouts
        self.began += 1
        for _ in range(3):
            await asyncio.sleep(0)

    async def train(self, rollouts: Any, version: int) -> StepResult:
        rollouts, self.parts = (*self.parts, *rollouts), []
        for rollout in rollouts:
            for token_version, seen in zip(rollout.versions, rollout.loss_mask, strict=True):
                assert not seen or version - token_version <= self.bound
        self.batches.append(rollouts)
        for _ in range(5):
            await asyncio.sleep(0)
        return StepResult({"policy/loss": 0.0}, "the loss is nan" if version in self.skips else "")


@dataclass
class Pusher:
    engines: Engines
    pushed: list[int] = field(default_factory=list)
    step: Step = Step.IDLE

    async def push(self, version: int) -> PushReport:
        await asyncio.sleep(0)
        self.engines.version = version
        self.pushed.append(version)
        return PushReport(version, 1, {"transfer": 0.0}, 0.0, dense_bytes=1)


@dataclass
class Watch:
    """Counts like the real one."""

    generated: int = 0
    trained: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    kept: list[tuple[int, str, int]] = field(default_factory=list)
    """Step, reason and number of groups of what was skipped."""

    @property
    def trace(self) -> Watch:
        return self

    ended: int = 0

    def open_spans(self) -> list[Any]:
        return []

    @contextlib.contextmanager
    def span(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        yield
        self.ended += 1

    def finished(self, group: Group) -> None:
        self.generated += sum(len(r.rollout.response_token_ids) for r in group.rollouts)

    def count(self, name: str, number: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + number

    def push(self, record: Any) -> None:
        pass

    def skipped(self, step: int, reason: str, groups: Any, advantages: Any) -> None:
        self.kept.append((step, reason, len(groups)))

    def step(self, step: int, metrics: Any, groups: Any, advantages: Any, *, version: int) -> None:
        assert version == step - 1
        self.steps.append(step)
        self.metrics.append(metrics)
        self.groups += groups
        self.trained += sum(sum(r.rollout.loss_mask) for group in groups for r in group.rollouts)


def parts(
    *, steps: int = 6, batch: int = 3, bound: int = 1, running: int = 100, rows: int = 50, **changes: Any
) -> Parts:
    on_expired = changes.pop("on_expired", "mask_tokens")
    config = Config(
        name="test",
        task="test",
        steps=steps,
        batch=BatchConfig(prompts=batch, streaming=changes.pop("streaming", False)),
        sampling=SamplingConfig(group_size=2),
        staleness=StalenessConfig(max_versions=bound, on_expired=on_expired),
    )
    engines = changes.pop("engines", Engines())
    rewards, watch = changes.pop("rewards", Rewards()), Watch()
    drop_group = changes.pop("drop_group", False)
    values: dict[str, Any] = {
        "config": config,
        "prompts": PromptStream([Prompt(number, (1, 2), "", {}) for number in range(rows)], seed=0),
        "engines": engines,
        "episodes": SingleTurn(engines, rewards, lambda ids: "text", watch, drop_group),
        "learner": Learner(bound),
        "pusher": Pusher(engines),
        "admission": Admission(batch, bound, running, on_expired, total_groups=steps * batch),
        "watch": watch,
    }
    return Parts(**{**values, **changes})
