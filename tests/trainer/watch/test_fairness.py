"""Shares of what was sampled that the loss saw, by halves of the prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from generator.rollout import Group, Prompt, Rollout, ScoredRollout
from trainer.watch.fairness import fairness_metrics


def group(length: int, reward: float | None, masked: int = 0) -> Group:
    """Two rollouts of so many tokens, of which the loss does not see the first ``masked``."""
    mask = (False,) * masked + (True,) * (length - masked)
    rollout = Rollout("0", (1,), (5,) * length, (-1.0,) * length, (0,) * length, mask, "stop")
    scored = ScoredRollout(rollout, "", reward, {})
    return Group(Prompt(0, (1,), "", {}), (scored, replace(scored, rollout=replace(rollout, id="1"))), 0)


def test_what_was_masked_and_what_was_dropped_lower_the_share_of_their_half():
    learned = [group(10, 1.0), group(10, 1.0), group(100, 0.0, masked=50)]
    shares = fairness_metrics(learned, dropped=[group(100, 0.0)])
    assert shares == {
        "fairness/short_trained_share": 1.0,
        "fairness/long_trained_share": pytest.approx(0.25),
        "fairness/hard_trained_share": pytest.approx(0.25),
        "fairness/easy_trained_share": 1.0,
    }


def test_prompts_that_are_all_alike_have_no_halves():
    assert fairness_metrics([group(10, 0.5), group(10, 0.5)], []) == {}


def test_a_group_without_a_reward_has_a_length_and_no_difficulty():
    shares = fairness_metrics([group(10, 1.0), group(20, 0.0)], [group(30, None)])
    assert shares["fairness/long_trained_share"] == 0.0
    assert (shares["fairness/hard_trained_share"], shares["fairness/easy_trained_share"]) == (1.0, 1.0)


def test_a_step_without_groups_says_nothing():
    assert fairness_metrics([], []) == {}
