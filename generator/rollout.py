"""The data model of a rollout: a resumable, version-tagged stream of tokens.

A rollout is grown one *segment* at a time. A segment is what one submission to an engine produced; between two
segments weights may have been pushed, or the engine may have been replaced. Everything that is known about a token
(its id, its behaviour log-probability, the policy version that sampled it, whether the loss sees it) is appended
together, by one constructor, so the four columns can never drift apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

FinishReason = Literal["stop", "length", "failed"]
"""Why a rollout ended: the model stopped by itself, the response budget ran out, or no engine could get on with it.

Never ``abort``: that ends a request, not a rollout."""


class RolloutError(ValueError):
    """A rollout that breaks an invariant of the data model. Says which rollout and which invariant."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens that one submission to an engine produced, all sampled by ``version``.

    ``token_ids`` and ``logprobs`` have equal length (it may be 0: an abort before the first token).
    ``logprobs`` are natural logarithms of the probabilities of the distribution that was sampled from.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """Prompt tokens plus response tokens, with a log-probability, a version and a loss-mask bit per response token.

    ``finish_reason`` is ``None`` while the rollout is unfinished. ``segments`` counts the submissions that contributed
    at least one token; ``resumes`` counts the submissions after the first, including those that were aborted empty.

    Raises :class:`RolloutError` when the columns differ in length, a log-probability is not finite or is positive, or
    versions decrease along the response.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    loss_mask: tuple[bool, ...] = ()
    finish_reason: FinishReason | None = None
    segments: int = 0
    resumes: int = 0

    def __post_init__(self) -> None:
        columns = {
            "response_token_ids": len(self.response_token_ids),
            "logprobs": len(self.logprobs),
            "versions": len(self.versions),
            "loss_mask": len(self.loss_mask),
        }
        if len(set(columns.values())) != 1:
            raise RolloutError(f"rollout {self.id}: columns differ in length: {columns}")
        for position, logprob in enumerate(self.logprobs):
            if not math.isfinite(logprob) or logprob > 1e-4:
                raise RolloutError(
                    f"rollout {self.id}: log-probability {logprob} at response position {position} is not a finite, "
                    "non-positive number; the engine reported a token it cannot have sampled"
                )
        if any(later < earlier for earlier, later in zip(self.versions, self.versions[1:], strict=False)):
            raise RolloutError(f"rollout {self.id}: policy versions decrease along the response: {self.versions}")
        if self.finish_reason not in (None, "stop", "length", "failed"):
            raise RolloutError(f"rollout {self.id}: {self.finish_reason!r} is not a final finish reason")

    @property
    def oldest_version(self) -> int | None:
        """The version of the oldest token, or ``None`` while there is no token."""
        return self.versions[0] if self.versions else None

    @property
    def newest_version(self) -> int | None:
        """The version of the newest token, or ``None`` while there is no token."""
        return self.versions[-1] if self.versions else None

    @property
    def version_count(self) -> int:
        """How many policy versions sampled this rollout."""
        return len(set(self.versions))

    def extended(self, segment: Segment, finish_reason: FinishReason | None = None) -> Rollout:
        """This rollout with ``segment`` appended, all columns together.

        Raises :class:`RolloutError` when the rollout is finished already or the segment breaks an invariant.
        """
        if self.finish_reason is not None:
            raise RolloutError(f"rollout {self.id} is finished ({self.finish_reason}) and cannot be extended")
        count = len(segment.token_ids)
        return replace(
            self,
            response_token_ids=self.response_token_ids + segment.token_ids,
            logprobs=self.logprobs + segment.logprobs,
            versions=self.versions + (segment.version,) * count,
            loss_mask=self.loss_mask + (True,) * count,
            finish_reason=finish_reason,
            segments=self.segments + (count > 0),
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data set, ready to sample from.

    ``text`` is what was tokenized (for people and for reward functions); ``columns`` are the other columns of the data
    set row, handed to the reward functions by name.
    """

    id: int
    token_ids: tuple[int, ...]
    text: str
    columns: dict[str, object]


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A finished rollout with its decoded text and its reward.

    ``reward`` is ``None`` when every reward function declined, raised or timed out: the rollout is then excluded and
    counted, never scored 0. ``reward_parts`` holds each function's unweighted value by name.
    """

    rollout: Rollout
    text: str
    reward: float | None
    reward_parts: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt and its scored rollouts. Advantages are computed inside a group."""

    prompt: Prompt
    rollouts: tuple[ScoredRollout, ...]
    admitted_version: int
    """The policy version that was published when the group was admitted."""

    @property
    def oldest_version(self) -> int:
        """The version of the oldest token in the group."""
        versions = [r.rollout.oldest_version for r in self.rollouts if r.rollout.oldest_version is not None]
        return min(versions, default=self.admitted_version)
