"""Staleness and concurrency: one object decides what may start and what may be learned from.

Pure: no clock, no tasks, no framework. The producing and the consuming side ask the same object, so they cannot
disagree. The rules with a picture: ``docs/staleness.md``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from generator.rollout import Group, Rollout, ScoredRollout


@dataclass(slots=True)
class Admission:
    """Counts places, in prompt groups, and knows how old what is learned from may be.

    *Admit.* Group number ``n`` (counting from 0, dropped groups left out) is learned from in batch
    ``n // batch_prompts``, at that learner version. Admitted at version ``v`` it will be at most ``max_versions`` old
    if

        n // batch_prompts <= v + max_versions

    so the number of groups ever admitted and not dropped may not exceed

        (version + max_versions + 1) * batch_prompts

    With ``max_versions = 0`` exactly one batch is admitted per version: on-policy.

    *Select.* Of what has finished, the group with the oldest token is learned from first
    (:class:`trainer.groups.Buffer`).

    *Expire.* The formula holds as long as groups finish in about the order in which they were admitted; a slow one may
    still be too old when it is taken. So the bound is applied once more, to each token and at the version of the step
    that takes it, the time in the queue included: :meth:`within_bound`. That makes it strict.
    """

    batch_prompts: int
    max_versions: int
    """What the learner's version may exceed that of the oldest token by."""
    max_running: int
    """Groups that may be sampled or scored at a time."""
    on_expired: str
    """What happens to a token past the bound: ``mask_tokens``, ``drop_rollout`` or ``drop_group``."""
    total_groups: int | None = None
    """Groups the run will learn from in all: nothing is sampled for a step that never comes. ``None``: endless."""
    version: int = 0
    """The learner's version, which is also the last published one."""
    running: int = 0
    buffered: int = 0
    consumed: int = 0

    def capacity(self) -> int:
        """How many more groups may be admitted now. Never negative."""
        admitted = self.running + self.buffered + self.consumed
        by_staleness = (self.version + self.max_versions + 1) * self.batch_prompts - admitted
        by_plan = by_staleness if self.total_groups is None else self.total_groups - admitted
        return max(0, min(by_staleness, by_plan, self.max_running - self.running))

    def admit(self) -> int:
        """Take a place for one group; returns the version it was admitted at. Raises if there is none."""
        if self.capacity() < 1:
            raise RuntimeError("a group was admitted although there was no place for it")
        self.running += 1
        return self.version

    def continue_at(self, version: int, buffered: int) -> None:
        """A run goes on after ``version`` steps, with ``buffered`` scored groups of its checkpoint.

        The bound is the same as after a fresh start (V2). Groups that were in flight are admitted again, before new
        ones; they had their places before, so there is room for them unless the configuration became narrower.
        """
        self.version, self.running, self.buffered = version, 0, buffered
        self.consumed = version * self.batch_prompts

    def within_bound(self, group: Group) -> Expired:
        """What may be learned from of a group that is taken from the buffer now, for the step at this version."""
        return expire(group, self.version, self.max_versions, self.on_expired)

    def finished(self) -> None:
        """A running group waits in the buffer now."""
        self._leave("running")
        self.buffered += 1

    def failed(self) -> None:
        """A running group gave up; its place is free."""
        self._leave("running")

    def filtered(self) -> None:
        """A buffered group will not be learned from; its place is free."""
        self._leave("buffered")

    def learned(self, groups: int) -> None:
        """``groups`` buffered groups went into a batch."""
        for _ in range(groups):
            self._leave("buffered")
        self.consumed += groups

    def published(self, version: int) -> None:
        """``version`` is what new tokens are sampled from. Raises unless it is the next one."""
        if version != self.version + 1:
            raise RuntimeError(f"version {version} was published after version {self.version}")
        self.version = version

    def _leave(self, place: str) -> None:
        count = getattr(self, place)
        if count < 1:
            raise RuntimeError(f"admission lost count: no group is {place}")
        setattr(self, place, count - 1)


@dataclass(frozen=True, slots=True)
class Expired:
    """What :func:`expire` left of a group."""

    group: Group | None
    tokens: int
    """Sampled tokens that were too old to be learned from, or left with one that was."""
    rollouts: int
    """Rollouts that lost every token that the loss would have seen."""


def expire(group: Group, version: int, max_versions: int, on_expired: str) -> Expired:
    """Apply the staleness bound at consumption, queue time included.

    A token is too old when ``version - token_version > max_versions``. ``mask_tokens`` takes the old tokens out of the
    loss and keeps the rest of the rollout, so that long and hard rollouts are not starved (V7); ``drop_rollout`` and
    ``drop_group`` take out the whole rollout or group. A group in which no token may be learned from is ``None``.
    """
    oldest_allowed = version - max_versions
    old = [_old_tokens(scored.rollout, oldest_allowed) for scored in group.rollouts]
    if not any(old):
        return Expired(group, 0, 0)
    before = sum(any(scored.rollout.loss_mask) for scored in group.rollouts)
    if on_expired == "drop_group":
        return Expired(None, sum(scored.rollout.sampled_tokens for scored in group.rollouts), before)
    rollouts: list[ScoredRollout] = []
    tokens = 0
    for scored, count in zip(group.rollouts, old, strict=True):
        length = len(scored.rollout.response_token_ids)
        masked = length if count and on_expired == "drop_rollout" else count
        tokens += scored.rollout.sampled_before(masked)
        mask = (False,) * masked + scored.rollout.loss_mask[masked:]
        # A dropped rollout keeps its reward: it is still a sample of its group's mean.
        rollouts.append(replace(scored, rollout=replace(scored.rollout, loss_mask=mask)))
    left = sum(any(scored.rollout.loss_mask) for scored in rollouts)
    return Expired(replace(group, rollouts=tuple(rollouts)) if left else None, tokens, before - left)


def _old_tokens(rollout: Rollout, oldest_allowed: int) -> int:
    """How many leading response tokens are older than allowed: versions never decrease along a rollout."""
    return sum(version < oldest_allowed for version in rollout.versions)
