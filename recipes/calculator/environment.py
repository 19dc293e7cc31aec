"""The environment: it reads each turn, answers a call with its result, and scores the final answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from generator.task import Episode, Sampler
from recipes.calculator.arithmetic import ArithmeticSyntaxError, calculate
from recipes.gsm8k.reward import answer_format, exact_answer, last_number

CALL = re.compile(r"<calc>([^<>]*)</calc>\s*$")
END_OF_CALL = ">"
"""A turn ends behind every token with this character, so that a call is answered before the model goes on."""
MAX_CALLS = 8
EXACT, LAST, CALLED = 0.6, 0.3, 0.1
"""What the reward is made of: the marked answer, the last number whether marked or not, and a call that could be
computed, because a small model seldom writes one at first."""


class CalculatorEnvironment:
    """A calculator: ``<calc>12*7</calc>`` is continued with `` = 84`` and a new line."""

    async def run(self, task: Mapping[str, Any], sampler: Sampler) -> Episode:
        """Play one word problem. ``task`` has the column ``answer``, which ends in ``#### <number>``."""
        stops = sampler.ids_containing(END_OF_CALL)
        conversation, said, calls, errors = sampler.token_ids, "", 0, 0
        while calls < MAX_CALLS:
            turn = await sampler.generate(conversation, stop_token_ids=stops)
            said, conversation = said + turn.text, sampler.token_ids
            if turn.finish_reason == "length" or turn.token_ids[-1] not in stops:
                break
            if call := CALL.search(said):
                calls += 1
                result = answer_to(call[1])
                errors += result.startswith("error")
                observation = f" = {result}\n"
                said, conversation = said + observation, conversation + sampler.encode(observation)
        return _scored(said, str(task["answer"]), calls, errors)


def answer_to(expression: str) -> str:
    """What the calculator says to ``expression``: the result, or ``error`` and what is wrong."""
    try:
        return calculate(expression)
    except ArithmeticSyntaxError as error:
        return f"error: {error}"


def _scored(said: str, answer: str, calls: int, errors: int) -> Episode:
    texts = ([""], [said])
    exact = exact_answer(*texts, answer=[answer])[0]
    last = last_number(*texts, answer=[answer])[0]
    return Episode(
        reward=EXACT * exact + LAST * last + CALLED * (calls > errors),
        parts={
            "exact_answer": exact,
            "last_number": last,
            "answer_format": answer_format(*texts)[0],
            "calculator_calls": float(calls),
        },
        log={"calls": calls, "errors": errors},
    )
