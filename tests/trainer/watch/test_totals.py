"""The numbers of a whole run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from trainer.watch.metrics import PushRecord
from trainer.watch.totals import RunningTotals


def test_every_generated_token_is_trained_or_expired_or_waiting(scored, group):
    totals = RunningTotals()
    item = scored(1.0, segments=((0, 2), (1, 3)))
    expired = replace(item, rollout=replace(item.rollout, loss_mask=(False, False, True, True, True)))
    waiting = scored(1.0, segments=((1, 4),))
    totals.add_finished([item.rollout, waiting.rollout])
    totals.add_step([group(expired)], 1.0)
    summary = totals.summary()
    assert (summary["tokens/trained"], summary["tokens/expired"], summary["tokens/generated"]) == (3, 2, 9)
    assert (summary["rollouts/finished"], summary["rollouts/resumed"]) == (2, 1)


def test_first_and_last_ten_steps_are_averaged_and_survive_a_checkpoint():
    totals = RunningTotals()
    for step in range(12):
        totals.add_step([], float(step))
    again = RunningTotals()
    again.load_state_dict(json.loads(json.dumps(totals.state_dict())))
    again.add_step([], 12.0)
    again.add_push(PushRecord(1, 0.0, 1.0, 0.5))
    assert again.summary()["reward/first10_mean"] == sum(range(10)) / 10
    assert again.summary()["reward/last10_mean"] == sum(range(3, 13)) / 10
    assert again.summary()["push/pause_seconds_mean"] == 0.5


def test_a_run_that_did_nothing_has_no_means():
    assert RunningTotals().summary()["reward/last10_mean"] is None
    assert RunningTotals().summary()["push/pause_seconds_mean"] is None


def test_a_total_that_does_not_exist_is_refused():
    with pytest.raises(KeyError, match="tokens/lsot"):
        RunningTotals().add("tokens/lsot", 1)


def test_observed_tokens_are_in_no_count_of_generated_or_expired_tokens(scored, group):
    item = scored(1.0, segments=((0, 4),))
    seen = replace(item, rollout=replace(item.rollout, finish_reason=None).observed([7, 8]))
    totals = RunningTotals()
    totals.add_finished([seen.rollout])
    totals.add_step([group(seen)], 1.0)
    assert [totals.counts[f"tokens/{name}"] for name in ("generated", "trained", "expired")] == [4, 4, 0]
