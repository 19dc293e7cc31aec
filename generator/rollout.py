"""The data model of a rollout: a resumable, version-tagged stream of tokens.

A rollout is grown one *segment* at a time. A segment is what one submission to an engine produced; between two
segments weights may have been pushed, or the engine may have been replaced. Everything that is known about a token
(its id, its behaviour log-probability, the policy version that sampled it, whether the loss sees it) is appended
together, by one constructor, so the four columns can never drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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

    Response tokens are *sampled*, or *observed*: written by an environment between two turns of the model.
    ``finish_reason`` is ``None`` while the rollout is unfinished. ``resumes`` counts the submissions after the first of
    a turn, including those that were aborted empty, and those after a restart of the run that continue tokens.

    Raises :class:`RolloutError` when the columns differ in length, a log-probability is not finite or is positive,
    versions decrease along the response, or observations overlap, come first, or are seen by the loss.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    loss_mask: tuple[bool, ...] = ()
    finish_reason: FinishReason | None = None
    resumes: int = 0
    observations: tuple[tuple[int, int], ...] = ()
    """The response positions ``[start, end)`` of observed tokens, in order. The loss mask cannot tell which these are:
    it is also cleared for sampled tokens that are too old."""

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
        self._check_observations()

    def _check_observations(self) -> None:
        previous = 0
        for start, end in self.observations:
            # A sampled token lies between two observations, and before the first one.
            if not previous < start < end <= len(self.response_token_ids):
                raise RolloutError(
                    f"rollout {self.id}: the observations {self.observations} are not separate ranges, in order, "
                    f"behind a sampled token and within the {len(self.response_token_ids)} response tokens"
                )
            if any(self.loss_mask[start:end]):
                raise RolloutError(
                    f"rollout {self.id}: the loss sees observed tokens at response positions {start}-{end}"
                )
            previous = end

    @property
    def oldest_version(self) -> int | None:
        """The version of the oldest token, or ``None`` while there is no token."""
        return self.versions[0] if self.versions else None

    @property
    def version_count(self) -> int:
        """How many policy versions sampled this rollout."""
        return len(set(self.versions))

    @property
    def sampled_tokens(self) -> int:
        """How many response tokens a policy sampled: all but the observed ones."""
        return self.sampled_before(len(self.response_token_ids))

    def sampled_before(self, position: int) -> int:
        """How many of the first ``position`` response tokens a policy sampled."""
        return position - sum(min(end, position) - min(start, position) for start, end in self.observations)

    @property
    def ends_with_observation(self) -> bool:
        """Whether the newest token is an observed one."""
        return bool(self.observations) and self.observations[-1][1] == len(self.response_token_ids)

    def first(self, count: int) -> Rollout:
        """The unfinished rollout of the first ``count`` response tokens."""
        return replace(
            self,
            response_token_ids=self.response_token_ids[:count],
            logprobs=self.logprobs[:count],
            versions=self.versions[:count],
            loss_mask=self.loss_mask[:count],
            observations=tuple((start, min(end, count)) for start, end in self.observations if start < count),
            finish_reason=None,
        )

    def observed(self, token_ids: Sequence[int]) -> Rollout:
        """This rollout with ``token_ids`` appended that no policy sampled, unfinished again.

        The loss does not see them; their log-probability is 0 and their version that of the token before them. Raises
        :class:`RolloutError` for a rollout without any sampled token, whose beginning belongs into the prompt, and for
        one that has failed.
        """
        if not token_ids:
            return replace(self, finish_reason=None)
        if not self.versions:
            raise RolloutError(
                f"rollout {self.id}: an observation before the first sampled token belongs to the prompt"
            )
        if self.finish_reason == "failed":
            raise RolloutError(f"rollout {self.id} has failed and cannot go on")
        start, count = len(self.response_token_ids), len(token_ids)
        earlier = self.observations
        if self.ends_with_observation:
            start, earlier = earlier[-1][0], earlier[:-1]
        return replace(
            self,
            response_token_ids=self.response_token_ids + tuple(token_ids),
            logprobs=self.logprobs + (0.0,) * count,
            versions=self.versions + (self.versions[-1],) * count,
            loss_mask=self.loss_mask + (False,) * count,
            observations=(*earlier, (start, len(self.response_token_ids) + count)),
            finish_reason=None,
        )

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
        )


def further(one: Rollout, other: Rollout) -> Rollout:
    """The one of two views of a rollout that knows more: more tokens, or as many and that they are all."""
    return max(one, other, key=lambda seen: (len(seen.response_token_ids), seen.finish_reason is not None))


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data set, ready to sample from.

    ``text`` is what was tokenized (for people and for reward functions); ``columns`` are the other columns of the data
    set row, handed to the reward functions by name. ``source`` names the data set where there are several.
    """

    id: int
    token_ids: tuple[int, ...]
    text: str
    columns: dict[str, object]
    source: str = ""


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
    log: dict[str, object] = field(default_factory=dict)
    """What an environment wants to be kept of the episode; plain values."""


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
