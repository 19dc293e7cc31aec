"""The tiny task with an environment: three turns, with a mark after each, scored by the share of the letter a."""

from __future__ import annotations

from generator.task import Episode
from recipes.ci_tiny import CiTiny

TURNS, TURN_TOKENS = 3, 8


class EchoEnvironment:
    async def run(self, task, sampler):
        said, conversation = "", sampler.token_ids
        for number in range(TURNS):
            turn = await sampler.generate(conversation, max_tokens=TURN_TOKENS)
            said += turn.text
            conversation = sampler.token_ids + sampler.encode(f"#{number}#")
        return Episode(said.count("a") / len(said) if said else 0.0, log={"turns": TURNS})


class Echo(CiTiny):
    def environment(self):
        return EchoEnvironment()
