"""Where scored rollouts come from: one turn and reward functions, or an environment. The loop does not know which."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

from generator.resume import Sampling
from generator.rollout import Prompt, Rollout, ScoredRollout
from generator.task import Environment, Episode
from trainer.conversation import Conversation, Engines, TextCodec
from trainer.unscored import NotScoredError, Unscored, finite_number


class EpisodeSource(Protocol):
    """Samples and scores the rollouts of one prompt; many prompts at a time."""

    async def sample(self, prompt: Prompt, rollouts: list[Rollout], version: int) -> tuple[ScoredRollout, ...]:
        """Bring every rollout to its end and score it, in the order given.

        ``rollouts`` are new, or hold the tokens that a checkpoint kept of them. ``version`` was published when the
        group was admitted. What cannot be scored has the reward ``None`` and is counted.
        """
        ...

    def partial_rollouts(self) -> dict[str, Rollout]:
        """What is known here, by the rollout's id, of rollouts that are being sampled or scored.

        What an engine samples at this moment is the engine's to tell.
        """
        ...

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call, under the names of :meth:`trainer.unscored.Unscored.take_counts`."""
        ...


class Trace(Protocol):
    """What is needed of the trace."""

    def span(self, track: str, name: str, **args: Any) -> AbstractContextManager[None]:
        """Record the time that the body takes."""
        ...


class Scorer(Protocol):
    """What is needed of :class:`trainer.rewards.RewardScorer`."""

    async def score(
        self, prompt: Prompt, rollouts: Sequence[Rollout], texts: Sequence[str]
    ) -> tuple[ScoredRollout, ...]:
        """Score finished rollouts."""
        ...

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        ...


class SingleTurn:
    """The model answers the prompt once, and reward functions score the group.

    ``decode`` turns response token ids into text. With ``drop_group`` a rollout that failed costs its whole group the
    reward, without it only itself. ``sampling`` is that of the engines unless given.
    """

    def __init__(
        self,
        engines: Engines,
        rewards: Scorer,
        decode: Callable[[tuple[int, ...]], str],
        trace: Trace,
        drop_group: bool = False,
        sampling: Sampling | None = None,
    ) -> None:
        self._engines = engines
        self._sampling = sampling
        self._rewards = rewards
        self._decode = decode
        self._trace = trace
        self._drop_group = drop_group
        self._scoring: dict[str, Rollout] = {}

    async def sample(self, prompt: Prompt, rollouts: list[Rollout], version: int) -> tuple[ScoredRollout, ...]:
        """Sample the group to its end, across any number of pushes, then score it."""
        with self._trace.span("engine", f"prompt {prompt.id}", version=version):
            finished = await self._engines.generate(rollouts, self._sampling)
        # The pool has forgotten the group by now; there was no await in between.
        self._scoring.update((rollout.id, rollout) for rollout in finished)
        try:
            with self._trace.span("reward", f"prompt {prompt.id}"):
                scored = await self._score(prompt, finished)
        finally:
            for rollout in finished:
                del self._scoring[rollout.id]
        return tuple(scored.get(rollout.id, ScoredRollout(rollout, "", None, {})) for rollout in finished)

    async def _score(self, prompt: Prompt, finished: list[Rollout]) -> dict[str, ScoredRollout]:
        ended = [rollout for rollout in finished if rollout.finish_reason != "failed"]
        if not ended or (len(ended) < len(finished) and self._drop_group):
            return {}
        texts = [self._decode(rollout.response_token_ids) for rollout in ended]
        return {item.rollout.id: item for item in await self._rewards.score(prompt, ended, texts)}

    def partial_rollouts(self) -> dict[str, Rollout]:
        """The finished rollouts whose groups are being scored, by id."""
        return dict(self._scoring)

    def take_counts(self) -> dict[str, int]:
        """What the reward functions did not score, since the last call."""
        return self._rewards.take_counts()


class MultiTurn:
    """An environment plays one episode a rollout; all rollouts of the run share the event loop.

    An episode that raises, takes longer than ``timeout`` seconds between two turns, or returns no finite reward leaves
    its rollout without one. An error of the engines is not the environment's: it ends the run.
    """

    def __init__(
        self,
        environment: Environment,
        engines: Engines,
        sampling: Sampling,
        codec: TextCodec,
        trace: Trace,
        *,
        timeout: float,
        drop_group: bool = False,
    ) -> None:
        self._environment = environment
        self._name = f"environment {type(environment).__name__}"
        self._engines = engines
        self._sampling = sampling
        self._codec = codec
        self._trace = trace
        self._timeout = timeout
        self._drop_group = drop_group
        self._playing: dict[str, Conversation] = {}
        self._unscored = Unscored()

    async def sample(self, prompt: Prompt, rollouts: list[Rollout], version: int) -> tuple[ScoredRollout, ...]:
        """Play every episode of the group, side by side."""
        try:
            with self._trace.span("engine", f"prompt {prompt.id}", version=version):
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._play(prompt, rollout)) for rollout in rollouts]
        finally:
            for rollout in rollouts:
                self._playing.pop(rollout.id, None)
        scored = [task.result() for task in tasks]
        if self._drop_group and any(item.rollout.finish_reason == "failed" for item in scored):
            scored = [replace(item, reward=None) for item in scored]
        return tuple(scored)

    def take_counts(self) -> dict[str, int]:
        """How many episodes had no reward since the last call, and how many parts no value, by cause."""
        return self._unscored.take_counts()

    def partial_rollouts(self) -> dict[str, Rollout]:
        """The tokens of the ended turns of each episode, by the rollout's id, until the whole group has ended."""
        return {number: conversation.partial for number, conversation in self._playing.items()}

    async def _play(self, prompt: Prompt, rollout: Rollout) -> ScoredRollout:
        """One episode, from its first turn to its reward."""
        conversation = Conversation(rollout, self._engines, self._sampling, self._codec, self._timeout)
        self._playing[rollout.id] = conversation
        reward, parts, log = None, {}, {}
        try:
            episode = await self._episode(prompt, conversation)
            parts = {str(name): self._part(name, value) for name, value in episode.parts.items()}
            log = _plain(episode.log)
            reward = _finite_reward(episode)
        except NotScoredError as error:
            self._unscored.tell(self._name, error)
        finally:
            conversation.closed = True
        ended = conversation.rollout
        return ScoredRollout(ended, self._codec.decode(ended.response_token_ids), reward, parts, log)

    async def _episode(self, prompt: Prompt, conversation: Conversation) -> Episode:
        """Run the environment; raises :class:`NotScoredError` with the cause when that brings no episode.

        It has a task of its own, because one that ignores its cancellation must not be waited for.
        """
        task = asyncio.ensure_future(self._environment.run(prompt.columns, conversation))
        try:
            async with asyncio.timeout(self._timeout) as conversation.deadline:
                await asyncio.wait({task})
        except TimeoutError:
            message = f"took longer than {self._timeout:g} s outside its turns (rewarding.timeout)"
            raise NotScoredError("timeout", message) from None
        finally:
            conversation.deadline = None
            task.cancel()
        if conversation.engine_error is not None:
            raise conversation.engine_error
        if conversation.rollout.finish_reason == "failed":
            raise NotScoredError("failed", "lost a turn that the engines could not finish")
        if task.cancelled():
            raise NotScoredError("failed", "cancelled itself")
        if (error := task.exception()) is not None:
            raise NotScoredError("failed", f"raised {type(error).__name__}: {error}") from error
        if not isinstance(episode := task.result(), Episode):
            raise NotScoredError("invalid", f"returned {episode!r:.80} instead of an Episode")
        if not conversation.rollout.sampled_tokens:
            raise NotScoredError("failed", "ended without a turn of the model")
        return episode

    def _part(self, name: str, value: Any) -> float | None:
        number = finite_number(value)
        if value is not None and number is None:
            what = f"has the part {name} = {value!r:.80}, which is not a finite number"
            self._unscored.tell(self._name, NotScoredError("invalid", what))
        return number


def _finite_reward(episode: Episode) -> float:
    if episode.reward is None:
        raise NotScoredError("declined", "gave no reward")
    reward = finite_number(episode.reward)
    if reward is None:
        raise NotScoredError("invalid", f"gave the reward {episode.reward!r:.80}, which is not a finite number")
    return reward


def _plain(log: Any) -> dict[str, object]:
    """``log`` as values that JSON has; what is none becomes its text."""
    try:
        plain: dict[str, object] = json.loads(json.dumps(dict(log), default=str))
    except (TypeError, ValueError) as error:
        raise NotScoredError("invalid", f"returned a log that cannot be written: {error}") from error
    return plain
