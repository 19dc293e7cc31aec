"""What to submit next for a rollout, or that it is finished. Pure: no engine, no clock, no randomness.

An engine gives no guarantee across submissions: a resubmission is a new request whose prompt is the old prompt plus
the tokens so far. Everything that counts output tokens, draws random numbers or looks at the end of the output must
therefore be corrected here, in one place (known faults R2, R3, R5, R6, R8):

- ``max_tokens`` and ``min_tokens`` are reduced by what is done, and a spent budget is never submitted;
- a seed names a different random stream for every number of tokens done;
- stop token ids are looked for at the end of the tokens so far, because an engine does not examine its prompt;
- stop strings are matched outside the engine (:mod:`generator.stops`), over the text of all segments;
- temperature, top-p, top-k, min-p and the repetition penalty (which sees prompt and output alike) go through as they
  are; presence and frequency penalties see the output only, so they cannot be resumed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from generator.rollout import FinishReason, Rollout


@dataclass(frozen=True, slots=True)
class Sampling:
    """How every rollout of a run is sampled. Budgets are cumulative over all resumes of a rollout."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    """Makes every rollout's random stream a function of this number, the rollout's id and the tokens done."""
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    """Every id that ends a rollout: the model's end-of-sequence ids (unless ignored) and the recipe's own."""
    stop: tuple[str, ...] = ()
    """Strings that end a rollout with the token that completes one; the response keeps that token."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    """Counts output tokens only: a rollout sampled with it cannot be resumed exactly."""
    frequency_penalty: float = 0.0
    """As ``presence_penalty``."""
    max_model_len: int = 0
    """Longest prompt plus response the engine holds; 0: no limit beside ``max_tokens``."""
    turn_start: int = 0
    """Response tokens there were when the current turn of an environment began: a stop token among them ended an
    earlier turn, not this one."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"sampling.max_tokens is {self.max_tokens}; a rollout needs a budget of at least 1 token")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"sampling.min_tokens is {self.min_tokens}; it must lie between 0 and max_tokens ({self.max_tokens})"
            )

    @property
    def resumable(self) -> bool:
        """Whether a rollout with tokens can be submitted again and sampled as if it had never been interrupted."""
        return self.presence_penalty == 0.0 and self.frequency_penalty == 0.0


@dataclass(frozen=True, slots=True)
class Submission:
    """The next request for an engine, always a single sequence: token ids in, never text (R9)."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    min_tokens: int
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The rollout needs no engine any more."""

    reason: FinishReason


def finish_reason(sampling: Sampling, rollout: Rollout, stopped: bool = False) -> FinishReason | None:
    """Why ``rollout`` is finished, judged from its tokens alone, or ``None``.

    An abort can arrive exactly with the last token. The engine then reports ``abort``; what the rollout holds decides:
    a stop token at the end is a natural stop, a spent budget is a length stop. ``stopped`` says that its last token
    completes a stop string; only a tokenizer can tell, see :class:`generator.stops.StopMatcher`.
    """
    if not rollout.response_token_ids:
        return None
    sampled_last = not rollout.ends_with_observation and len(rollout.response_token_ids) > sampling.turn_start
    stop_token = rollout.response_token_ids[-1] in sampling.stop_token_ids
    if sampled_last and (stopped or (stop_token and rollout.sampled_tokens > sampling.min_tokens)):
        return "stop"
    if budget_left(sampling, rollout) <= 0:
        return "length"
    return None


def budget_left(sampling: Sampling, rollout: Rollout) -> int:
    """Response tokens that may still be sampled: the smaller of the budget's and the context's remainder.

    Observed tokens fill the context, but nobody samples them: they do not count against ``max_tokens``.
    """
    left = sampling.max_tokens - rollout.sampled_tokens
    if sampling.max_model_len:
        left = min(left, sampling.max_model_len - len(rollout.prompt_token_ids) - len(rollout.response_token_ids))
    return left


def next_submission(sampling: Sampling, rollout: Rollout, stopped: bool = False) -> Submission | Finished:
    """Decide from the original request and the tokens so far what to submit next.

    ``stopped`` is that of :func:`finish_reason`. A rollout that has tokens but cannot be resumed exactly
    (:attr:`Sampling.resumable`) has ``failed``: its engine was lost, and going on elsewhere would sample from another
    distribution than was asked for.

    Raises ``ValueError`` when the prompt alone fills the context: nothing could ever be sampled.
    """
    reason = rollout.finish_reason or finish_reason(sampling, rollout, stopped)
    if reason is not None:
        return Finished(reason)
    left = budget_left(sampling, rollout)
    if left <= 0:
        raise ValueError(
            f"rollout {rollout.id}: the prompt has {len(rollout.prompt_token_ids)} tokens and the context holds "
            f"{sampling.max_model_len}; no response token fits"
        )
    begun = len(rollout.response_token_ids) > sampling.turn_start
    if begun and not sampling.resumable:
        return Finished("failed")
    done = rollout.sampled_tokens
    return Submission(
        prompt_token_ids=rollout.prompt_token_ids + rollout.response_token_ids,
        max_tokens=left,
        min_tokens=min(left, max(0, sampling.min_tokens - done)),
        seed=None if sampling.seed is None else stream_seed(sampling.seed, rollout.id, len(rollout.response_token_ids)),
    )


def stream_seed(seed: int, rollout_id: str, done: int) -> int:
    """The seed of a request, in [0, 2**63): the same in every process, another one for every argument.

    An engine draws a request's random numbers from the start of the stream that the seed names. With the number of
    tokens ``done`` in the seed no resume repeats the noise of an earlier segment, and a request that was aborted before
    its first token is submitted again unchanged; with the id in it the rollouts of a group differ.
    """
    digest = hashlib.blake2b(f"{seed}/{rollout_id}/{done}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
