"""Where every prompt group is, from its admission to the step that learns from it.

A group is in exactly one place: brought by a checkpoint and not begun again, being sampled and scored, scored and
waiting, or in the batch of the step in progress. Each move is made in one go, without an ``await``, so that a look at
all of them, at any moment, finds every group once: that look is what a checkpoint keeps.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from generator.rollout import Group, Prompt, Rollout, further


@dataclass(frozen=True, slots=True)
class StartedGroup:
    """A group that is being sampled, and its rollouts as they were when that began."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    admitted_version: int
    """The policy version that was published when the group was admitted first."""


@dataclass(frozen=True, slots=True)
class KeptGroups:
    """Every group that was admitted and not learned from, at one moment."""

    scored: tuple[Group, ...] = ()
    """To be learned from."""
    started: tuple[StartedGroup, ...] = ()
    """To be sampled to their end, from the tokens that they have."""
    first_number: int = 0
    """The number of the next new group: rollout ids stay unique over restarts."""

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt of each group; one that is in flight twice is there twice."""
        return [*(group.prompt.id for group in self.scored), *(group.prompt.id for group in self.started)]


class Buffer:
    """Scored groups that wait to be learned from; the one with the oldest token comes first. One taker at a time."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Group]] = []
        self._arrival = itertools.count()
        self._filled = asyncio.Event()

    def put(self, group: Group) -> None:
        """Add a group; never blocks, admission bounds the size."""
        heapq.heappush(self._heap, (group.oldest_version, next(self._arrival), group))
        self._filled.set()

    async def take(self) -> Group:
        """Wait for a group. Admission and the engines' rollout deadline bound the wait."""
        while not self._heap:
            self._filled.clear()
            await self._filled.wait()
        return heapq.heappop(self._heap)[2]

    def groups(self) -> list[Group]:
        """All of them, in the order in which they would be taken."""
        return [group for _, _, group in sorted(self._heap)]

    def __len__(self) -> int:
        return len(self._heap)


@dataclass(slots=True)
class Groups:
    """The groups of a run between admission and the step on them. Its owner tells admission about every move."""

    buffer: Buffer = field(default_factory=Buffer)
    _waiting: deque[StartedGroup] = field(default_factory=deque)
    """What a checkpoint brought and has no place yet."""
    _sampling: dict[str, StartedGroup] = field(default_factory=dict)
    """By the id of the first rollout."""
    _taken: list[Group] = field(default_factory=list)
    """Taken from the buffer for the step in progress, as they were in it."""
    _next_number: int = 0

    def begin(self, prompt: Prompt, size: int, version: int) -> StartedGroup:
        """A new group of ``size`` rollouts, admitted at ``version``: it is being sampled from now on."""
        number, self._next_number = self._next_number, self._next_number + 1
        rollouts = tuple(Rollout(f"{number}-{member}", prompt.token_ids) for member in range(size))
        return self._begun(StartedGroup(prompt, rollouts, version))

    def begin_again(self) -> StartedGroup | None:
        """The next group that a checkpoint brought unfinished, if one is left: it is being sampled from now on."""
        return self._begun(self._waiting.popleft()) if self._waiting else None

    def _begun(self, started: StartedGroup) -> StartedGroup:
        self._sampling[started.rollouts[0].id] = started
        return started

    def ended(self, started: StartedGroup) -> None:
        """A group is not sampled or scored any more: it goes into the buffer now, or is lost."""
        del self._sampling[started.rollouts[0].id]

    async def take(self) -> Group:
        """Wait for the next group of the buffer: it belongs to the step in progress from now on."""
        group = await self.buffer.take()
        self._taken.append(group)
        return group

    def expired(self, group: Group) -> None:
        """The group just taken cannot be learned from."""
        self._taken = [other for other in self._taken if other is not group]

    def learned(self) -> None:
        """The step in progress is made."""
        self._taken.clear()

    def kept(self, newest: Mapping[str, Rollout]) -> KeptGroups:
        """Every group as of now. ``newest`` may know further tokens of rollouts that are being sampled, by their id.

        A step in progress counts as not made: what it was to learn from goes back into the buffer.
        """
        sampling = [
            replace(group, rollouts=tuple(further(newest.get(one.id, one), one) for one in group.rollouts))
            for group in self._sampling.values()
        ]
        return KeptGroups(
            scored=(*self._taken, *self.buffer.groups()),
            started=(*sampling, *self._waiting),
            first_number=self._next_number,
        )

    def restore(self, kept: KeptGroups) -> None:
        """Continue with what a checkpoint kept. Only before anything else."""
        for group in kept.scored:
            self.buffer.put(group)
        self._waiting.extend(kept.started)
        self._next_number = kept.first_number
