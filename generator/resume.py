"""What to submit next for a rollout, or that it is finished. Pure: no engine, no clock, no randomness.

An engine gives no guarantee across submissions: a resubmission is a new request whose prompt is the old prompt plus
the tokens so far. Everything that counts output tokens or looks at the end of the output must therefore be corrected
here, in one place (known faults R2, R3, R5, R6).
"""

from __future__ import annotations

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
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    """Every id that ends a rollout: the model's end-of-sequence ids (unless ignored) and the recipe's own."""
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


@dataclass(frozen=True, slots=True)
class Submission:
    """The next request for an engine: token ids in, never text (R9)."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    min_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The rollout needs no engine any more."""

    reason: FinishReason


def finish_reason(sampling: Sampling, rollout: Rollout) -> FinishReason | None:
    """Why ``rollout`` is finished, judged from its tokens alone, or ``None``.

    An abort can arrive exactly with the last token. The engine then reports ``abort``; what the rollout holds decides:
    a stop token at the end is a natural stop, a spent budget is a length stop.
    """
    if not rollout.response_token_ids:
        return None
    sampled_last = not rollout.ends_with_observation and len(rollout.response_token_ids) > sampling.turn_start
    stopped = sampled_last and rollout.response_token_ids[-1] in sampling.stop_token_ids
    if stopped and rollout.sampled_tokens > sampling.min_tokens:
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


def next_submission(sampling: Sampling, rollout: Rollout) -> Submission | Finished:
    """Decide from the original request and the tokens so far what to submit next.

    Raises ``ValueError`` when the prompt alone fills the context: nothing could ever be sampled.
    """
    reason = rollout.finish_reason or finish_reason(sampling, rollout)
    if reason is not None:
        return Finished(reason)
    left = budget_left(sampling, rollout)
    if left <= 0:
        raise ValueError(
            f"rollout {rollout.id}: the prompt has {len(rollout.prompt_token_ids)} tokens and the context holds "
            f"{sampling.max_model_len}; no response token fits"
        )
    done = rollout.sampled_tokens
    return Submission(
        prompt_token_ids=rollout.prompt_token_ids + rollout.response_token_ids,
        max_tokens=left,
        min_tokens=min(left, max(0, sampling.min_tokens - done)),
    )
