"""A tokenizer of one token a character, and engines that say what a script tells them: for tests of environments."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from generator.resume import Finished, Sampling, next_submission
from generator.rollout import Prompt, Rollout, Segment
from trainer.conversation import TextCodec

EOS = 1
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"


class CharacterTokenizer:
    """Ids 0 and 1 are special and have no text; the others are characters."""

    def __len__(self) -> int:
        return len(CHARACTERS) + 2

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [CHARACTERS.index(character) + 2 for character in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(CHARACTERS[number - 2] for number in token_ids if number > 1)

    def batch_decode(self, batch: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(token_ids) for token_ids in batch]


CODEC = TextCodec(CharacterTokenizer())


def sampling(**changes: Any) -> Sampling:
    return Sampling(**{"max_tokens": 100, "max_model_len": 200, "stop_token_ids": frozenset({EOS}), **changes})


@dataclass
class ScriptedEngines:
    """Continues a rollout with the next tokens of its script, a line a turn, aborted every ``every`` tokens.

    A line ends with an end-of-sequence token unless it has run into a stop token or the budget before. Every abort
    raises the version, as a push would.
    """

    lines: Sequence[str]
    every: int = 3
    sampling: Sampling = field(default_factory=sampling)
    version: int = 0
    error: Exception | None = None
    turns: int = 0
    said: dict[str, int] = field(default_factory=dict)
    """How many lines each rollout has been told."""

    async def generate(self, rollouts: list[Rollout], sampling: Sampling | None = None) -> list[Rollout]:
        if self.error is not None:
            raise self.error
        return [await self._turn(rollout, sampling or self.sampling) for rollout in rollouts]

    async def _turn(self, rollout: Rollout, sampling: Sampling) -> Rollout:
        self.turns += 1
        number = self.said.get(rollout.id, 0)
        self.said[rollout.id] = number + 1
        script = [*CODEC.encode(self.lines[number]), EOS]
        while not isinstance(decision := next_submission(sampling, rollout), Finished):
            await asyncio.sleep(0)
            tokens: list[int] = []
            while script and len(tokens) < min(self.every, decision.max_tokens):
                tokens.append(script.pop(0))
                if tokens[-1] in sampling.stop_token_ids:
                    break
            assert tokens, "the script has ended, and the turn has not"
            rollout = rollout.extended(Segment(tuple(tokens), (-1.0,) * len(tokens), self.version))
            self.version += 1
        return rollout.extended(Segment((), (), self.version), decision.reason)


class NoTrace:
    """Records nothing."""

    def span(self, track: str, name: str, **args: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def prompt(text: str, **columns: Any) -> Prompt:
    return Prompt(0, CODEC.encode(text), text, columns)


def rollouts(of: Prompt, count: int = 1) -> list[Rollout]:
    return [Rollout(f"0-{number}", of.token_ids) for number in range(count)]
