"""That an engine computes with the weights it was sent: its log-probabilities of fixed sequences against the learner's.

What travels right can still be loaded wrong: into another layer, not at all, or beside a copy that stays old (the
packed output head of vLLM on CPU). Nothing but the outcome of a forward pass shows that.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

LENGTHS = (5, 19, 67)
"""Tokens of the sequences: within one block of the KV cache and across several, for blocks of 8 to 64 tokens."""

Sequences = tuple[tuple[int, ...], ...]
Logprobs = Sequence[Sequence[float]]
"""Of each sequence, every token but the first, natural logarithms at temperature 1."""


class Tolerance(NamedTuple):
    """Absolute differences of log-probabilities, in nats, that two right computations may show."""

    mean: float
    largest: float


TOLERANCES: dict[str, Tolerance] = {
    # The two sides add in another order. Measured on SmolLM2 (30 layers): mean 1.1e-5, largest 1.9e-4.
    "float32": Tolerance(1e-4, 2e-3),
    # Eight bits of mantissa: logits of 8 to 32 are multiples of 1/16 to 1/8, and both sides round after every layer.
    # Measured on SmolLM2: mean 0.08, largest 0.6. A false alarm would end a run, so other models get some room.
    "bfloat16": Tolerance(0.25, 3.0),
}
"""By the dtype in which both sides compute. What these let pass, such as one changed bit of a bfloat16 weight, is for
the digests to find."""


class CanaryError(RuntimeError):
    """Engines do not compute with the weights that they were sent.

    ``engine`` is one to blame. It is ``None`` where every engine there is is wrong: then the learner is, or how weights
    are loaded, and another engine would be told the same.
    """

    def __init__(self, message: str, engine: str | None = None) -> None:
        self.engine = engine
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """How far the engines that were asked are from the learner, in nats, over all tokens of all of them."""

    abs_diff_mean: float
    abs_diff_max: float
    engines: int


def canary_sequences(vocabulary: int, max_length: int, seed: int = 0) -> Sequences:
    """Random token ids below ``vocabulary``, the same for the same arguments, in the lengths of :data:`LENGTHS`.

    Sequences longer than ``max_length`` tokens, at least 2, are cut to it.
    """
    if max_length < 2:
        raise ValueError(f"a canary needs sequences of 2 tokens and more, but the context has room for {max_length}")
    dice = random.Random(seed)
    lengths = sorted({min(length, max_length) for length in LENGTHS})
    return tuple(tuple(dice.randrange(vocabulary) for _ in range(length)) for length in lengths)


def compare(expected: Logprobs, answers: Mapping[str, Logprobs | None], dtype: str) -> CanaryReport | None:
    """Compare what engines answered, by their names, with the learner's ``expected``.

    ``None`` is the answer of an engine that could not be asked, and what is returned if none could. Raises
    :class:`CanaryError` when the difference of an engine is beyond the tolerance of ``dtype``, or not a number.
    """
    limit = TOLERANCES[dtype]
    by_engine = {name: _differences(expected, answer) for name, answer in answers.items() if answer is not None}
    if not by_engine:
        return None
    wrong = {name: what for name, found in by_engine.items() if (what := _complaint(found, limit))}
    if wrong:
        tokens = sum(len(sequence) for sequence in expected)
        raise CanaryError(
            f"the canary: {', '.join(wrong)} of {len(by_engine)} engine(s) that were asked do not compute with the "
            f"weights that were pushed. Of {tokens} log-probabilities in {len(expected)} fixed sequences: "
            f"{'; '.join(f'{name} {what}' for name, what in wrong.items())}. Allowed in {dtype}: {limit.mean:g} on "
            f"average, {limit.largest:g} at most. Look for an output head that was left stale, weights under the "
            "names of others, and a model that the learner computes otherwise than vLLM",
            engine=next(iter(wrong)) if len(wrong) < len(answers) else None,
        )
    everything = [value for found in by_engine.values() for value, _, _ in found]
    return CanaryReport(sum(everything) / len(everything), max(everything), len(by_engine))


def differ(one: Logprobs, other: Logprobs, dtype: str) -> bool:
    """Whether two answers are further apart than :func:`compare` lets pass."""
    return bool(_complaint(_differences(one, other), TOLERANCES[dtype]))


Difference = tuple[float, int, int]
"""Absolute difference, sequence, position of the token in it."""


def _differences(expected: Logprobs, answer: Logprobs) -> list[Difference]:
    return [
        (abs(here - there), number, position)
        for number, (ours, theirs) in enumerate(zip(expected, answer, strict=True))
        for position, (here, there) in enumerate(zip(ours, theirs, strict=True), start=1)
    ]


def _complaint(found: list[Difference], limit: Tolerance) -> str:
    """What is wrong with the differences of one engine; empty if nothing is."""
    if unreal := [entry for entry in found if not math.isfinite(entry[0])]:
        _, sequence, position = unreal[0]
        return f"is not a number in {len(unreal)} of them, first in sequence {sequence} at token {position}"
    mean = sum(value for value, _, _ in found) / len(found)
    largest, sequence, position = max(found)
    if mean <= limit.mean and largest <= limit.largest:
        return ""
    return f"is off by {mean:.3g} on average and by {largest:.3g} at most (sequence {sequence}, token {position})"
