"""One rollout of an environment: the sampler that the environment is given.

It owns the rollout. The environment passes the whole conversation each time; what is new at its end is the observation,
and whatever else differs is refused, so that no token that the model sampled can change under its log-probability.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from generator.resume import Sampling, budget_left, finish_reason
from generator.rollout import Rollout, further
from generator.task import Turn, TurnError
from trainer.threads import in_daemon_thread

Result = TypeVar("Result")


class Engines(Protocol):
    """What is needed of the engine pool."""

    async def generate(self, rollouts: list[Rollout], sampling: Sampling | None = None) -> list[Rollout]:
        """Sample the rollouts to their end."""
        ...


class TextCodec:
    """Text and token ids, by a Hugging Face tokenizer. ``vocabulary``: ids below it are known to the tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = len(tokenizer)
        self.ids_containing = functools.lru_cache(maxsize=64)(self._ids_containing)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of ``text`` as it stands, without special tokens added."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    @functools.cached_property
    def texts(self) -> list[str]:
        """The text of every id; special tokens have none. The first access takes seconds for a large vocabulary."""
        ids = [[number] for number in range(self.vocabulary)]
        return list(self._tokenizer.batch_decode(ids, skip_special_tokens=True))

    def _ids_containing(self, text: str) -> frozenset[int]:
        return frozenset(number for number, token in enumerate(self.texts) if text in token)


class Conversation:
    """The :class:`generator.task.Sampler` of one rollout.

    ``rollout`` may hold tokens of an earlier run, which its checkpoint brought: turns are then taken from them as long
    as the environment does the same again, and sampled after that. ``limit`` is the seconds that the environment may
    take between two turns.
    """

    def __init__(self, rollout: Rollout, engines: Engines, sampling: Sampling, codec: TextCodec, limit: float) -> None:
        self.rollout = Rollout(rollout.id, rollout.prompt_token_ids, resumes=rollout.resumes)
        """The rollout as far as its turns have ended."""
        self.engine_error: Exception | None = None
        """What the engines raised: the run's failure, not the environment's."""
        self.deadline: asyncio.Timeout | None = None
        """Bounds the time that the environment takes; whoever runs it sets this and takes it away again."""
        self.closed = False
        """Set when the environment was given up: it samples nothing any more."""
        self._recording: Rollout | None = rollout if rollout.response_token_ids else None
        self._engines = engines
        self._sampling = sampling
        self._codec = codec
        self._limit = limit
        self._sampling_now = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt, sampled tokens and observations so far."""
        return self.rollout.prompt_token_ids + self.rollout.response_token_ids

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be sampled, all turns together."""
        return max(0, budget_left(self._sampling, self.rollout))

    @property
    def partial(self) -> Rollout:
        """Every token that is known of this rollout: its turns so far, or the recording that it follows."""
        return further(self.rollout, self._recording or self.rollout)

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, stop_token_ids: Iterable[int] = ()
    ) -> Turn:
        """Let the model continue ``token_ids``: see :meth:`generator.task.Sampler.generate`."""
        self._check_open()
        if max_tokens is not None and max_tokens < 1:
            raise TurnError(f"max_tokens is {max_tokens}; a turn needs at least 1")
        observation = self._observation(tuple(token_ids))
        rollout = self.rollout.observed(observation)
        room = budget_left(self._sampling, rollout)
        if room <= 0:
            self.rollout = replace(self.rollout, finish_reason="length")
            self.closed = True
            return Turn((), "", "length")
        start = len(rollout.response_token_ids)
        turn = self._turn_sampling(rollout, min(room, max_tokens or room), stop_token_ids)
        self._sampling_now = True
        self._set_deadline(None)
        try:
            self.rollout = await self._sample(rollout, turn)
        finally:
            self._sampling_now = False
            self._set_deadline(self._limit)
        if self.rollout.finish_reason == "failed":
            self.closed = True
            raise TurnError("the engines could not finish this turn (engine.rollout_tries)")
        sampled = self.rollout.response_token_ids[start:]
        reason = self.rollout.finish_reason
        assert reason is not None, "the pool returns finished rollouts only"
        return Turn(sampled, self._codec.decode(sampled), reason)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of an observation."""
        return self._codec.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self._codec.decode(token_ids)

    def ids_containing(self, text: str) -> frozenset[int]:
        """Every id of the vocabulary whose text contains ``text``."""
        return self._codec.ids_containing(text)

    async def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run ``function(*args)`` in a thread; it has the time that the environment has between two turns."""
        result: Result = await in_daemon_thread(functools.partial(function, *args), "environment")
        return result

    # -- a turn -----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.closed:
            raise TurnError(
                "the rollout is over: there was no room for another token, it failed, or the environment took longer "
                "than rewarding.timeout; return the episode after an empty turn"
            )
        if self._sampling_now:
            raise TurnError("a turn of this rollout is being sampled; await one turn before asking for the next")

    def _observation(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """What follows the conversation so far in ``token_ids``. Raises :class:`TurnError` where they differ."""
        known = self.token_ids
        if token_ids[: len(known)] != known:
            pairs = enumerate(zip(token_ids, known, strict=False))
            position = next((at for at, (given, ours) in pairs if given != ours), len(token_ids))
            raise TurnError(
                f"the token ids do not continue the conversation: they differ at position {position} of the "
                f"{len(known)} tokens so far; pass sampler.token_ids + sampler.encode(observation), and never text "
                "that was decoded and encoded again"
            )
        observation = token_ids[len(known) :]
        if unknown := [number for number in observation if not 0 <= number < self._codec.vocabulary]:
            raise TurnError(f"the observation has the token id {unknown[0]}, which the model does not know")
        if observation and not self.rollout.response_token_ids:
            raise TurnError(
                "the first turn starts from the prompt alone, which all rollouts of a group share: what the model is "
                "to read first belongs into Task.prompt"
            )
        return observation

    def _turn_sampling(self, rollout: Rollout, budget: int, stop_token_ids: Iterable[int]) -> Sampling:
        """The run's sampling with the budget and stop tokens of one turn; budgets are cumulative over a rollout."""
        max_tokens = rollout.sampled_tokens + budget
        return replace(
            self._sampling,
            max_tokens=max_tokens,
            min_tokens=min(self._sampling.min_tokens, max_tokens),
            stop_token_ids=self._sampling.stop_token_ids | frozenset(stop_token_ids),
            turn_start=len(rollout.response_token_ids),
        )

    async def _sample(self, rollout: Rollout, turn: Sampling) -> Rollout:
        rollout = self._replay(rollout, turn)
        if rollout.finish_reason is not None:
            return rollout
        try:
            (finished,) = await self._engines.generate([rollout], turn)
        except Exception as error:
            self.engine_error = error
            raise
        return finished

    def _replay(self, rollout: Rollout, turn: Sampling) -> Rollout:
        """``rollout`` with what the recording holds of this turn: all of it, a part, or nothing."""
        recording, start = self._recording, len(rollout.response_token_ids)
        if recording is None:
            return rollout
        until = min([at for at, _ in recording.observations if at >= start] + [len(recording.response_token_ids)])
        if recording.first(start).response_token_ids != rollout.response_token_ids or until <= start:
            # The environment does something else this time, or the recording is used up.
            self._recording = None
            return rollout
        until = min(until, start + turn.max_tokens - rollout.sampled_tokens)
        stops = (at for at in range(start, until) if recording.response_token_ids[at] in turn.stop_token_ids)
        for at in stops:
            if reason := finish_reason(turn, known := recording.first(at + 1)):
                return replace(known, finish_reason=reason)
        known = recording.first(until)
        return replace(known, finish_reason=finish_reason(turn, known))

    # -- time -------------------------------------------------------------------------------------------------------

    def _set_deadline(self, seconds: float | None) -> None:
        """The environment has ``seconds`` from now until its next turn; ``None``: it waits for the model."""
        if self.deadline is not None and not self.deadline.expired():
            when = None if seconds is None else asyncio.get_running_loop().time() + seconds
            self.deadline.reschedule(when)
