"""A batch from the buffer: groups are taken, oldest first, until it is full. The learner may begin before it is."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from generator.rollout import Group
from trainer.algorithm.filters import keep_group
from trainer.batch import Batch, make_batch, train_rollouts
from trainer.train_rollout import TrainRollout

if TYPE_CHECKING:
    from trainer.loop import Parts


@dataclass(frozen=True, slots=True)
class Filled:
    """A full batch and how it came about."""

    batch: Batch
    rest: tuple[TrainRollout, ...]
    """The rollouts of the batch that the learner has not begun with."""
    dropped: tuple[Group, ...]
    """Groups that were taken and are not in it."""
    waited: float
    """Seconds without a group to take."""
    metrics: dict[str, float]
    """What was passed over, and why."""


async def fill_batch(parts: Parts) -> Filled:
    """Take groups until a batch is full. Tokens past the staleness bound leave the loss here.

    With dynamic sampling (``algorithm.filter.refill``) a group whose rewards are all equal is passed over, and another
    one sampled. With ``batch.streaming`` the learner works on what there is whenever no further group is finished.
    """
    config, filling = parts.config, _Filling(parts)
    may_replace = config.algorithm.filter.refill * config.batch.prompts
    while len(filling.groups) < config.batch.prompts:
        if config.batch.streaming and not len(parts.groups.buffer):
            await filling.begin_learning()
        group = await filling.take()
        kept = parts.admission.within_bound(group)
        filling.count("staleness/expired_tokens", kept.tokens)
        filling.count("staleness/expired_rollouts", kept.rollouts)
        if kept.group is None:
            filling.count("staleness/expired_groups", 1)
            filling.pass_over(group, kept.tokens)
            parts.prompts.give_back(group.prompt)
        elif filling.metrics["filter/replaced_groups"] < may_replace and not teaches(group):
            filling.count("filter/replaced_groups", 1)
            filling.pass_over(group, sum(scored.rollout.sampled_tokens for scored in group.rollouts))
            parts.prompts.done(group.prompt)
        else:
            filling.groups.append(kept.group)
    return await filling.filled()


def teaches(group: Group) -> bool:
    """Whether the rewards of the group differ."""
    return keep_group([scored.reward for scored in group.rollouts])


def _started(group: Group) -> tuple[int, str]:
    """Orders groups as they were started: rollout ids begin with the number of their group."""
    id = group.rollouts[0].rollout.id
    return len(id), id


@dataclass
class _Filling:
    """A batch that is not full yet."""

    parts: Parts
    groups: list[Group] = field(default_factory=list)
    """As they are learned from."""
    begun: int = 0
    """So many of them the learner has begun with."""
    penalties: list[float] = field(default_factory=list)
    """Of their rollouts, where the KL penalty enters the reward; the newest groups have none yet."""
    dropped: list[Group] = field(default_factory=list)
    waited: float = 0.0
    metrics: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            (
                "staleness/expired_tokens",
                "staleness/expired_rollouts",
                "staleness/expired_groups",
                "filter/replaced_groups",
            ),
            0.0,
        )
    )

    def count(self, name: str, number: int) -> None:
        self.metrics[name] += number

    async def take(self) -> Group:
        """The next group of the buffer, when there is one."""
        if len(self.parts.groups.buffer):
            return await self.parts.groups.take()
        started = time.monotonic()
        with self.parts.watch.trace.span("learner", "wait for rollouts"):
            group = await self.parts.groups.take()
        self.waited += time.monotonic() - started
        return group

    def pass_over(self, group: Group, tokens: int) -> None:
        """The group just taken will not be learned from: its place is free, ``tokens`` are accounted for."""
        self.dropped.append(group)
        self.parts.watch.count("tokens/expired", tokens)
        self.parts.groups.expired(group)
        self.parts.admission.filtered()
        self.parts.place_freed.set()

    async def begin_learning(self) -> None:
        """Have the learner accumulate the gradients of the groups that are new."""
        new = self.groups[self.begun :]
        if not new:
            return
        penalties = await self._penalties_of(new)
        algorithm, budget = self.parts.config.algorithm, self.parts.config.sampling.max_tokens
        part = make_batch(new, algorithm, budget, penalties, first=self.begun)
        async with self.parts.weights:
            with self.parts.watch.trace.span("learner", f"begin with {len(new)} groups"):
                await self.parts.learner.accumulate(part.rollouts, self.parts.admission.version)
        self.begun += len(new)

    async def filled(self) -> Filled:
        """The batch, with the advantages of all of it: those of a part are the same.

        What the learner has not begun with is in the order in which it was started: where each rollout is the same in
        every run, so is what the learner computes, whichever finished first.
        """
        self.parts.admission.learned(len(self.groups))
        self.groups[self.begun :] = sorted(self.groups[self.begun :], key=_started)
        await self._penalties_of(self.groups[self.begun :])
        algorithm, budget = self.parts.config.algorithm, self.parts.config.sampling.max_tokens
        batch = make_batch(self.groups, algorithm, budget, self.penalties or None)
        begun = sum(len(group.rollouts) for group in self.groups[: self.begun])
        if self.parts.config.batch.streaming:
            self.metrics["tokens/streamed"] = float(sum(sum(one.loss_mask) for one in batch.rollouts[:begun]))
        return Filled(batch, batch.rollouts[begun:], tuple(self.dropped), self.waited, self.metrics)

    async def _penalties_of(self, groups: list[Group]) -> list[float] | None:
        """What leaving the reference model costs each rollout, where the KL penalty enters the reward."""
        kl = self.parts.config.algorithm.kl
        if kl.coefficient <= 0 or kl.place != "reward":
            return None
        async with self.parts.weights:  # a push would wait behind this pass at the learner, against its deadline
            penalties = await self.parts.learner.kl_penalties(train_rollouts(groups))
        self.penalties += penalties
        return penalties
