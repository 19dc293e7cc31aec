"""Groups of real rollouts for the tests of this room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from generator.rollout import FinishReason, Group, Prompt, Rollout, ScoredRollout, Segment


def _rollout(segments: Sequence[tuple[int, int]], finish: FinishReason = "stop", resumes: int | None = None) -> Rollout:
    """A rollout of (version, tokens) segments."""
    rollout = Rollout("r", (1, 2), resumes=max(0, len(segments) - 1) if resumes is None else resumes)
    for number, (version, tokens) in enumerate(segments, start=1):
        last = number == len(segments)
        rollout = rollout.extended(Segment((7,) * tokens, (-0.5,) * tokens, version), finish if last else None)
    return rollout


def _scored(
    reward: float | None,
    segments: Sequence[tuple[int, int]] = ((0, 3),),
    finish: FinishReason = "stop",
    text: str = "four",
    **parts: float | None,
) -> ScoredRollout:
    return ScoredRollout(_rollout(segments, finish), text, reward, dict(parts))


def _group(*rollouts: ScoredRollout, prompt: str = "What is 2 + 2?") -> Group:
    return Group(Prompt(0, (1, 2), prompt, {}), rollouts, admitted_version=0)


@pytest.fixture
def rollout() -> Callable[..., Rollout]:
    return _rollout


@pytest.fixture
def scored() -> Callable[..., ScoredRollout]:
    return _scored


@pytest.fixture
def group() -> Callable[..., Group]:
    return _group
