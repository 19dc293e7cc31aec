"""The algorithm: two coroutines.

``produce`` keeps the engines busy: it admits prompts as long as they will not be too old when they are learned from,
samples a group of rollouts for each, scores it and puts it into the buffer. ``learn`` takes a batch of groups from the
buffer, makes one optimizer step and pushes the new weights into the engines, in the middle of whatever they are
generating. Neither waits for the other beyond the staleness bound; with ``staleness.max_versions=0`` the same code is
ordinary on-policy training.

What was left out of GRPO: no KL penalty and no reference model, one optimizer step per batch. What was added: every
token carries the version of the policy that sampled it, and the loss weighs it by how likely the current policy would
have been to sample it (truncated importance sampling).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from generator.pool import EnginePool
from generator.rollout import Group, Prompt, Rollout
from trainer.admission import Admission, expire
from trainer.batch import Batch, make_batch
from trainer.config import Config
from trainer.data import PromptStream
from trainer.learner_group import LearnerGroup
from trainer.rewards import RewardScorer
from trainer.state import save_checkpoint
from trainer.watch import Watch
from trainer.watch.metrics import push_record
from weight_sync.push import Pusher


@dataclass
class Parts:
    """What the algorithm works with. ``trainer.run`` builds the parts and owns their lifetime."""

    config: Config
    prompts: PromptStream
    engines: EnginePool
    rewards: RewardScorer
    decode: Callable[[tuple[int, ...]], str]
    """Response token ids to text, special tokens left out."""
    learner: LearnerGroup
    pusher: Pusher
    admission: Admission
    watch: Watch
    buffer: Buffer = field(default_factory=lambda: Buffer())  # defined below
    place_freed: asyncio.Event = field(default_factory=asyncio.Event)
    steps_done: int = 0
    """Optimizer steps made, those before a checkpoint was continued included."""
    in_training: Batch | None = None
    """The batch of the step in progress."""


async def train(parts: Parts) -> None:
    """Run until ``config.steps`` optimizer steps are done. An error in either coroutine ends both and is raised.

    The weights at start are pushed first, as version 0 (or the version of the checkpoint): a path that is broken fails
    in the first minute, and an engine never samples from weights that the learner did not send.
    """
    await push(parts, version=parts.steps_done)
    async with asyncio.TaskGroup() as tasks:
        producing = tasks.create_task(produce(parts))
        await learn(parts)
        producing.cancel()


async def produce(parts: Parts) -> None:
    """Start a group whenever admission has a place."""
    async with asyncio.TaskGroup() as groups:
        while True:
            while parts.admission.capacity() > 0:
                prompt = parts.prompts.next()
                version = parts.admission.admit()
                groups.create_task(sample_group(parts, prompt, version), name=f"group of prompt {prompt.id}")
            parts.place_freed.clear()
            await parts.place_freed.wait()


async def sample_group(parts: Parts, prompt: Prompt, version: int) -> None:
    """Sample one group to its end, across any number of pushes, score it and put it into the buffer."""
    rollouts = [
        Rollout(id=f"{prompt.id}-{version}-{number}", prompt_token_ids=prompt.token_ids)
        for number in range(parts.config.sampling.group_size)
    ]
    with parts.watch.trace.span("engine", f"prompt {prompt.id}", version=version):
        finished = await parts.engines.generate(rollouts)
    with parts.watch.trace.span("reward", f"prompt {prompt.id}"):
        texts = [parts.decode(rollout.response_token_ids) for rollout in finished]
        group = Group(prompt, await parts.rewards.score(prompt, finished, texts), version)
    parts.watch.finished(group)
    if all(rollout.reward is None for rollout in group.rollouts):
        parts.watch.count("tokens/lost", sum(len(rollout.response_token_ids) for rollout in finished))
        parts.prompts.done(prompt)
        parts.admission.failed("unscored")
        parts.place_freed.set()
        return
    parts.admission.finished()
    parts.buffer.put(group)


async def learn(parts: Parts) -> None:
    """Batch, optimizer step, push; until ``config.steps`` are done."""
    while parts.steps_done < parts.config.steps:
        started = time.monotonic()
        batch = parts.in_training = await next_batch(parts)
        waited = time.monotonic() - started

        version = parts.admission.version
        with parts.watch.trace.span("learner", f"step {parts.steps_done + 1}"):
            metrics = await parts.learner.train(batch.rollouts, version)
        step_done(parts)
        metrics |= {"idle/learner_seconds": waited, "timing/train_seconds": time.monotonic() - started - waited}
        await push(parts, version + 1)

        metrics |= parts.rewards.take_counts()
        await asyncio.to_thread(
            parts.watch.step, parts.steps_done, metrics, batch.groups, batch.advantages, version=version
        )
        await maybe_checkpoint(parts)


def step_done(parts: Parts) -> None:
    """The learner has made the optimizer step on ``in_training``: its prompts are dealt with."""
    assert parts.in_training is not None
    parts.steps_done += 1
    for group in parts.in_training.groups:
        parts.prompts.done(group.prompt)
    parts.in_training = None


async def next_batch(parts: Parts) -> Batch:
    """Take groups, oldest first, until the batch is full. Tokens past the staleness bound leave the loss here."""
    config = parts.config
    groups: list[Group] = []
    while len(groups) < config.batch.prompts:
        group = await parts.buffer.take()
        kept = expire(group, parts.admission.version, config.staleness.max_versions, config.staleness.on_expired)
        if kept.group is None:
            parts.watch.count("tokens/expired", kept.tokens)
            parts.admission.filtered("expired")
            parts.prompts.give_back(group.prompt)
            parts.place_freed.set()
            continue
        groups.append(kept.group)
    parts.admission.learned(len(groups))
    return make_batch(groups, config.algorithm.advantage)


async def push(parts: Parts, version: int) -> None:
    """Move the learner's weights into every engine and publish them as ``version``."""
    started = time.time()
    report = await parts.pusher.push(version)
    if version != parts.admission.version:
        parts.admission.published(version)
    parts.place_freed.set()
    parts.watch.push(push_record(report, started, parts.engines.interrupted))


async def maybe_checkpoint(parts: Parts) -> None:
    """Write a checkpoint where ``checkpoint.every`` asks for one."""
    every = parts.config.checkpoint.every
    if every and parts.steps_done % every == 0:
        await save_checkpoint(parts)


class Buffer:
    """Scored groups that wait to be learned from; the one with the oldest token comes first."""

    def __init__(self) -> None:
        self._queue: asyncio.PriorityQueue[tuple[int, int, Group]] = asyncio.PriorityQueue()
        self._arrival = itertools.count()

    def put(self, group: Group) -> None:
        """Add a group; never blocks, admission bounds the size."""
        self._queue.put_nowait((group.oldest_version, next(self._arrival), group))

    async def take(self) -> Group:
        """Wait for a group. Admission and the engines' rollout deadline bound the wait."""
        return (await self._queue.get())[2]

    def __len__(self) -> int:
        return self._queue.qsize()
