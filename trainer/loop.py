"""The algorithm: two coroutines.

``produce`` keeps the engines busy: it admits prompts as long as they will not be too old when they are learned from,
samples a group of rollouts for each, scores it and puts it into the buffer. ``learn`` takes a batch of groups from the
buffer (:mod:`trainer.filling`), makes one step on it (one optimizer update, or several) and pushes the new weights into
the engines, in the middle of whatever they are generating. Neither waits for the other beyond the staleness bound; with
``staleness.max_versions=0`` the same code is ordinary on-policy training.

What was left out of GRPO, unless ``algorithm.kl`` and ``learner.epochs`` ask for it: the KL penalty with its reference
model, and further updates on a batch. What was added: every token carries the version of the policy that sampled it,
and the loss weighs it by how likely the current policy would have been to sample it (truncated importance sampling).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from generator.rollout import Group
from trainer.admission import Admission
from trainer.batch import Batch
from trainer.concurrency import Concurrency, adapt_concurrency
from trainer.config import Config
from trainer.data import PromptStream
from trainer.episodes import EpisodeSource
from trainer.evaluation import Evaluations
from trainer.filling import fill_batch
from trainer.groups import Groups, StartedGroup
from trainer.state import try_checkpoint
from trainer.watch.fairness import fairness_metrics
from trainer.watch.metrics import push_record
from trainer.watchdog import watch_for_stalls
from weight_sync.push import Pusher

if TYPE_CHECKING:
    from generator.pool import EnginePool
    from trainer.learner_group import LearnerGroup
    from trainer.watch import Watch

UNSCORED_BATCHES = 3
"""So many batches of groups without any reward in a row end the run: it would never get a batch to learn from."""


class NonFiniteError(RuntimeError):
    """Step after step had a loss or gradient that is NaN or infinite. The weights are those of the last update made."""


class RewardError(RuntimeError):
    """The reward functions, or the environment, do not score what is sampled."""


@dataclass
class Parts:
    """What the algorithm works with. ``trainer.assembly`` builds the parts and owns their lifetime."""

    config: Config
    prompts: PromptStream
    engines: EnginePool
    episodes: EpisodeSource
    """Where scored rollouts come from: one turn and reward functions, or an environment."""
    learner: LearnerGroup
    pusher: Pusher
    admission: Admission
    watch: Watch
    model_source: str = ""
    """What ``model.path`` turned out to name, in one phrase."""
    check_resources: Callable[[Config], None] = lambda config: None
    """Raises ``ConfigError`` when the cluster cannot hold such a run."""
    running_limit: Callable[[Config], int] = lambda config: max(1, config.staleness.max_running_groups)
    """How many groups may be in flight at most in such a run."""
    groups: Groups = field(default_factory=Groups)
    """Those that are sampled, scored, or learned from in the step in progress."""
    evaluations: Evaluations = field(default_factory=Evaluations)
    evaluation_engines: EnginePool | None = None
    """Those that are there for evaluations alone, and below what brings them weights."""
    evaluation_pusher: Pusher | None = None
    place_freed: asyncio.Event = field(default_factory=asyncio.Event)
    weights: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while weights change or travel."""
    steps_done: int = 0
    """Batches learned from, those before a checkpoint was continued included. Each is a policy version."""
    skipped_in_a_row: int = 0
    """Steps with a skipped update since the last one without."""
    in_training: Batch | None = None
    """The batch of the step in progress."""
    unreported: Batch | None = None
    """The batch of a step that is made but not yet shown and written."""
    reporting: threading.Lock = field(default_factory=threading.Lock)
    """Held while a step is shown and written."""
    committing: threading.Lock = field(default_factory=threading.Lock)
    """Held while a checkpoint gets its last files and its name, and while what one has left is removed."""
    unscored_in_a_row: int = 0
    kv_cache_usage: float = 0.0
    """Of the fullest engine since the last step, where it is looked at."""
    reported: Counter[str] = field(default_factory=Counter)
    """The engine pool's counts at the last step."""
    concurrency: Concurrency = field(init=False)
    """Owns ``admission.max_running``."""

    def __post_init__(self) -> None:
        self.concurrency = Concurrency(self.admission.max_running)


async def train(parts: Parts) -> None:
    """Run until ``config.steps`` steps are done. An error in either coroutine ends both and is raised.

    The weights at start are pushed first, as version 0 (or the version of the checkpoint): a path that is broken fails
    in the first minute, and an engine never samples from weights that the learner did not send.
    """
    async with parts.weights:
        await push(parts, version=parts.steps_done)
    await parts.evaluations.begin(parts.steps_done, parts.weights)
    helpers = (produce, equip_engines, adapt_concurrency, watch_for_stalls)
    try:
        async with asyncio.TaskGroup() as tasks:
            helping = [tasks.create_task(work(parts)) for work in helpers]
            await learn(parts)
            for task in helping:
                task.cancel()
    finally:
        await parts.evaluations.give_up("the run ends before it does")


async def produce(parts: Parts) -> None:
    """Start a group whenever admission has a place."""
    async with asyncio.TaskGroup() as sampling:
        while True:
            while parts.admission.capacity() > 0:
                started = next_group(parts)
                sampling.create_task(sample_group(parts, started), name=f"group of prompt {started.prompt.id}")
            parts.place_freed.clear()
            await parts.place_freed.wait()


def next_group(parts: Parts) -> StartedGroup:
    """Take a place. What a checkpoint brought unfinished goes on first, then comes the next prompt of the data."""
    version = parts.admission.admit()
    if (started := parts.groups.begin_again()) is not None:
        return started
    return parts.groups.begin(parts.prompts.next(), parts.config.sampling.group_size, version)


async def sample_group(parts: Parts, started: StartedGroup) -> None:
    """Sample one group to its end, across any number of pushes, score it and put it into the buffer."""
    prompt, version = started.prompt, started.admitted_version
    group = Group(prompt, await parts.episodes.sample(prompt, list(started.rollouts), version), version)
    # No await from here on: a checkpoint finds the group in one place, and its tokens counted as that place asks.
    parts.watch.finished(group)
    parts.groups.ended(started)
    if all(rollout.reward is None for rollout in group.rollouts):
        unscored(parts, group)
    else:
        parts.unscored_in_a_row = 0
        parts.admission.finished()
        parts.groups.buffer.put(group)
    parts.place_freed.set()


def unscored(parts: Parts, group: Group) -> None:
    """No rollout of the group got a reward: it is lost and counted. Raises when that goes on and on."""
    parts.watch.count("tokens/lost", sum(scored.rollout.sampled_tokens for scored in group.rollouts))
    parts.prompts.done(group.prompt)
    parts.admission.failed()
    parts.unscored_in_a_row += 1
    if parts.unscored_in_a_row >= UNSCORED_BATCHES * parts.config.batch.prompts:
        counts = ", ".join(f"{name} {count}" for name, count in parts.episodes.take_counts().items() if count)
        raise RewardError(
            f"the last {parts.unscored_in_a_row} prompt groups got no reward at all ({counts}); the warnings above say "
            "what the reward functions or the environment raised or returned"
        )


async def learn(parts: Parts) -> None:
    """Batch, step, push; until ``config.steps`` are done.

    A step whose update was skipped, because its loss or gradient was not finite, has learned from its batch what there
    was to learn: its version is published with the weights as they are, so that versions go on counting batches.
    """
    while parts.steps_done < parts.config.steps:
        started = time.monotonic()
        filled = await fill_batch(parts)
        parts.in_training = batch = filled.batch

        version = parts.admission.version
        async with parts.weights:
            with parts.watch.trace.span("learner", f"step {parts.steps_done + 1}"):
                result = await parts.learner.train(filled.rest, version)
            step_done(parts)
            seconds = time.monotonic() - started - filled.waited
            timing = {"idle/learner_seconds": filled.waited, "timing/train_seconds": seconds}
            fairness = fairness_metrics(batch.groups, filled.dropped)
            metrics = result.metrics | timing | filled.metrics | fairness
            await push(parts, version + 1)

        await asyncio.to_thread(report_step, parts, metrics, result.skipped)
        await parts.evaluations.begin(parts.steps_done, parts.weights)
        refuse_to_go_on_without_learning(parts, result.skipped)
        await maybe_checkpoint(parts)
    await parts.evaluations.ended()


def step_done(parts: Parts) -> None:
    """The learner has made the step on ``in_training``: its prompts are dealt with."""
    assert parts.in_training is not None
    batch, parts.in_training = parts.in_training, None
    parts.unreported = batch
    parts.groups.learned()
    parts.steps_done += 1
    for group in batch.groups:
        parts.prompts.done(group.prompt)


def report_step(parts: Parts, metrics: dict[str, float], skipped: str = "") -> None:
    """Show and write the step just done, once: returns when that is so, whoever does it.

    ``skipped`` says why an update was skipped, if one was: its batch is then kept for people to look at.
    """
    with parts.reporting:
        batch, parts.unreported = parts.unreported, None
        if batch is None:
            return
        parts.watch.count("tokens/lost", batch.unscored_tokens)
        counts = parts.episodes.take_counts()
        done = parts.steps_done
        if skipped:
            parts.watch.skipped(done, skipped, batch.groups, batch.advantages)
        metrics = metrics | batch.filtered | counts | engine_counts(parts)
        parts.watch.step(done, metrics, batch.groups, batch.advantages, version=done - 1)


def refuse_to_go_on_without_learning(parts: Parts, skipped: str) -> None:
    """Raise :class:`NonFiniteError` when ``learner.max_skipped_steps`` steps in a row had an update skipped."""
    parts.skipped_in_a_row = parts.skipped_in_a_row + 1 if skipped else 0
    limit = parts.config.learner.max_skipped_steps
    if parts.skipped_in_a_row >= limit:
        raise NonFiniteError(
            f"{limit} steps in a row (learner.max_skipped_steps) had an update whose loss or gradient is not finite, "
            f"lastly step {parts.steps_done}: {skipped}. The batches are in the run folder, rollouts/skipped_step_*"
        )


def engine_counts(parts: Parts) -> dict[str, float]:
    """What happened to engines and to requests at them since the last step, also added to the totals."""
    now = Counter(parts.engines.counts)
    if (others := parts.evaluation_engines) is not None:
        now.update({name: others.counts[name] for name in ("engines/lost", "engines/restarted")})
    since, parts.reported = now - parts.reported, now
    for name, count in since.items():
        parts.watch.count(name, count)
    usage, parts.kv_cache_usage = parts.kv_cache_usage, 0.0
    looked_at = {"engines/kv_cache_usage": usage} if parts.config.staleness.adapt_running_groups else {}
    return {
        **dict.fromkeys(now, 0.0),
        **since,
        **looked_at,
        "engines/serving": float(parts.engines.serving),
        "engines/max_running_groups": float(parts.admission.max_running),
    }


async def push(parts: Parts, version: int) -> None:
    """Move the learner's weights into every engine and publish them as ``version``.

    A new version waits for an evaluation that needs the weights of the one before.
    """
    new = version != parts.admission.version
    if new:
        await parts.evaluations.before_push()
    started = time.time()
    report = await parts.pusher.push(version)
    if new:
        parts.admission.published(version)
    parts.place_freed.set()
    parts.watch.push(push_record(report, started, parts.engines.interrupted))


async def equip_engines(parts: Parts) -> None:
    """Bring the published version to engines that joined in the middle of the run, as soon as no other push does."""
    while True:
        await parts.engines.joined.wait()
        async with parts.weights:
            if parts.engines.joined.is_set():
                await push(parts, parts.admission.version)


async def maybe_checkpoint(parts: Parts) -> None:
    """Write a checkpoint where ``checkpoint.every`` asks for one. If it cannot be written the run goes on without."""
    every = parts.config.checkpoint.every
    if every and parts.steps_done % every == 0 and parts.steps_done < parts.config.steps:
        with parts.watch.trace.span("learner", f"checkpoint {parts.steps_done}"):
            await try_checkpoint(parts)
