"""What a simulated engine samples: tokens that depend on nothing but the seed, the rollout and the position."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from generator.resume import Finished, Sampling, next_submission
from generator.rollout import Rollout


@dataclass(frozen=True, slots=True)
class SimulatedSettings:
    """How a simulated engine behaves. Times are in seconds of the event loop's clock."""

    sampling: Sampling
    seed: int = 0
    """Of the token stream: the same for all engines of a pool."""
    vocabulary: int = 1000
    max_running: int = 64
    """Requests that are sampled at a time; others wait for them."""
    token_seconds: float = 0.02
    """From one token of a request to its next."""
    start_seconds: float = 30.0
    latency: float = 0.0
    """What a call takes to arrive, and its answer to come back."""
    loaded_version: int | None = None
    """What an engine holds when it has started."""
    answer_timeout: float = 30.0
    """After so long without an answer a call fails; ``generate`` has no deadline."""
    tail: float | None = None
    """Exponent of a Pareto distribution of response lengths, the smaller the heavier; ``None``: stop tokens decide."""
    shortest: int = 1
    """Tokens of the shortest response of that distribution."""
    kv_tokens: int = 0
    """Tokens that the KV cache holds; 0: any number. Requests beyond are counted as preempted, and go on."""
    failing: float = 0.0
    """Share of the rollouts that fail somewhere on their way, as those do that get no token any more. Where stop tokens
    decide about the length, anywhere in the budget; what has ended before does not fail."""


def stream_token(settings: SimulatedSettings, rollout_id: str, position: int) -> tuple[int, float]:
    """Token and log-probability at a position of the response. Ids are 0 .. ``vocabulary - 1``, natural logarithms."""
    text = f"{settings.seed}/{rollout_id}/{position}"
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return (number >> 16) % settings.vocabulary, -(1 + number % 65536) / 8192


def response_length(settings: SimulatedSettings, sampling: Sampling, rollout_id: str) -> int | None:
    """Tokens of a response whose length is drawn from the heavy tail; ``None`` where stop tokens decide."""
    if settings.tail is None:
        return None
    length = settings.shortest * (1.0 - _uniform(settings, f"{rollout_id}/length")) ** (-1.0 / settings.tail)
    return min(sampling.max_tokens, max(sampling.min_tokens + 1, int(length)))


def fails_after(settings: SimulatedSettings, sampling: Sampling, rollout_id: str) -> int | None:
    """After how many tokens the rollout fails; ``None`` if it does not."""
    if not settings.failing or (chance := _uniform(settings, f"{rollout_id}/fails")) >= settings.failing:
        return None
    length = response_length(settings, sampling, rollout_id) or sampling.max_tokens
    return int(length * chance / settings.failing)  # anywhere before its end, all places alike


def _uniform(settings: SimulatedSettings, name: str) -> float:
    """In [0, 1), a function of seed and name."""
    digest = hashlib.blake2b(f"{settings.seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def whole_stream(settings: SimulatedSettings, sampling: Sampling, rollout: Rollout) -> list[tuple[int, float]]:
    """What is still to be sampled of ``rollout`` until it is finished, or fails.

    Stop tokens are passed over before the minimum, and before the end of a response whose length is drawn. Raises
    ``ValueError`` when the prompt fills the context.
    """
    decision = next_submission(sampling, rollout)
    if isinstance(decision, Finished):
        return []
    done = len(rollout.response_token_ids)
    length = response_length(settings, sampling, rollout.id)
    fails = fails_after(settings, sampling, rollout.id)
    tokens: list[tuple[int, float]] = []
    for position in range(done, done + decision.max_tokens):
        if position == fails:
            break
        token, logprob = stream_token(settings, rollout.id, position)
        if length is not None and position + 1 == length < sampling.max_tokens and sampling.stop_token_ids:
            return [*tokens, (min(sampling.stop_token_ids), logprob)]
        if token in sampling.stop_token_ids:
            if position >= sampling.min_tokens and length is None:
                return [*tokens, (token, logprob)]
            while token in sampling.stop_token_ids:
                token = (token + 1) % settings.vocabulary
        tokens.append((token, logprob))
    return tokens


def sequence_logprobs(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """What simulated engines and learners compute for given sequences, with weights of any version: by the token."""
    return [[-1.0 - token_id % 7 for token_id in sequence[1:]] for sequence in sequences]
