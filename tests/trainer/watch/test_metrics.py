"""The numbers of a step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from trainer.watch import catalogue
from trainer.watch.metrics import (
    PushRecord,
    push_metrics,
    reward_metrics,
    source_metrics,
    staleness_metrics,
    step_metrics,
)
from weight_sync.canary import CanaryReport


def test_a_rollout_without_reward_is_counted_and_changes_no_mean(scored):
    metrics = reward_metrics([scored(1.0, exact=1.0), scored(None, exact=None), scored(0.5, exact=0.0)])
    assert metrics["reward/excluded"] == 1
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/std"] == 0.25
    assert metrics["reward/exact"] == 0.5


def test_a_step_without_any_reward_has_no_reward_mean(scored):
    assert reward_metrics([scored(None)]) == {"reward/excluded": 1.0}


def test_a_reward_function_named_like_a_statistic_does_not_replace_it(scored):
    metrics = reward_metrics([scored(1.0, mean=9.0)])
    assert metrics["reward/mean"] == 1.0
    assert metrics["reward/part_mean"] == 9.0


def test_the_data_sets_of_a_mixture_are_told_apart_and_a_single_one_is_not(scored, group):
    def of(source, *rewards):
        found = group(*[scored(reward) for reward in rewards])
        return replace(found, prompt=replace(found.prompt, source=source))

    groups = [of("easy", 1.0, 0.0), of("hard", None, None), of("easy", 1.0, None)]
    assert source_metrics(groups) == {
        "by_source/easy/reward_mean": pytest.approx(2 / 3),
        "by_source/easy/groups": 2.0,
        "by_source/hard/groups": 1.0,
    }
    assert source_metrics([of("", 1.0)]) == {}
    metrics = step_metrics(groups, version=0, seconds=1.0, generated_tokens=0)
    assert catalogue.unknown(metrics) == []


def test_staleness_splits_into_versions_passed_in_flight_and_in_the_queue(rollout):
    metrics = staleness_metrics([rollout([(3, 2), (5, 2)])], version=6)
    assert metrics["staleness/token_mean"] == (3 + 3 + 1 + 1) / 4
    assert metrics["staleness/token_max"] == metrics["staleness/rollout_max"] == 3
    assert metrics["staleness/in_flight_max"] == 2
    assert metrics["staleness/queue_max"] == 1


def test_masked_tokens_do_not_count_as_stale(rollout):
    partly = replace(rollout([(0, 2), (5, 2)]), loss_mask=(False, False, True, True))
    metrics = staleness_metrics([partly], version=6)
    assert metrics["staleness/token_max"] == 1
    assert metrics["staleness/masked_fraction"] == 0.5


def test_equal_rewards_have_zero_variance_even_where_rounding_would_show_some(scored, group):
    equal = group(*[scored(0.1) for _ in range(3)])
    single = group(scored(1.0), scored(None))
    mixed = group(scored(0.0), scored(1.0))
    metrics = step_metrics([equal, single, mixed], version=0, seconds=1.0, generated_tokens=0)
    assert metrics["group/zero_variance_fraction"] == pytest.approx(2 / 3)
    assert metrics["group/reward_std_mean"] == pytest.approx(0.5 / 3)


def test_throughput_counts_tokens_that_the_loss_sees_apart_from_generated_ones(scored, group):
    item = scored(1.0, segments=((0, 4),))
    masked = replace(item, rollout=replace(item.rollout, loss_mask=(False, True, True, True)))
    metrics = step_metrics([group(masked)], version=0, seconds=2.0, generated_tokens=10)
    assert metrics["throughput/trained_tokens_per_second"] == 1.5
    assert metrics["throughput/generated_tokens_per_second"] == 5.0


def test_lengths_and_ends_of_completions(scored, group):
    items = [scored(1.0, ((0, 2),)), scored(0.0, ((0, 2), (1, 4)), "length")]
    metrics = step_metrics([group(*items)], version=1, seconds=1.0, generated_tokens=0)
    assert metrics["completions/length_mean"] == 4
    assert metrics["completions/length_max"] == 6
    assert metrics["completions/stop_fraction"] == metrics["completions/truncated_fraction"] == 0.5
    assert metrics["completions/versions_mean"] == 1.5
    assert metrics["completions/resumed_fraction"] == 0.5


def test_every_metric_we_make_is_in_the_catalogue(scored, group):
    phases = (("transfer", 0.0, 0.2), ("verify", 0.2, 0.1))
    canary = CanaryReport(0.1, 0.3, 2)
    push = PushRecord(1, 0.0, 0.5, 0.4, bytes=10, interrupted_rollouts=1, phases=phases, canary=canary)
    metrics = step_metrics(
        [group(scored(1.0, exact=1.0))], version=0, seconds=1.0, generated_tokens=1, pushes=[push],
        extra={"policy/loss": 0.1, "mismatch/ess": 1.0, "idle/learner_seconds": 0.0, "timing/train_seconds": 1.0},
    )  # fmt: skip
    assert catalogue.unknown(metrics) == []
    assert catalogue.unknown(["policy/lsos", "nothing"]) == ["nothing", "policy/lsos"]


def test_the_bytes_of_a_step_stand_beside_what_they_would_have_been_without_deltas():
    metrics = push_metrics([PushRecord(1, 0.0, 0.5, 0.4, bytes=sent, dense_bytes=100) for sent in (100, 3)])
    assert (metrics["push/bytes"], metrics["push/dense_bytes"]) == (103.0, 200.0)


def test_the_canary_of_a_step_is_that_of_the_pushes_in_it_that_had_one():
    canaries = [CanaryReport(0.1, 0.3, 2), None, CanaryReport(0.2, 0.25, 1)]
    metrics = push_metrics([PushRecord(1, 0.0, 0.5, 0.4, canary=canary) for canary in canaries])
    assert metrics["push/canary_abs_diff_mean"] == pytest.approx(0.15)
    assert metrics["push/canary_abs_diff_max"] == 0.3
    assert metrics["push/canary_engines"] == 3
    assert not any("canary" in name for name in push_metrics([PushRecord(1, 0.0, 0.5, 0.4)]))


def test_catalogue_names_are_unique_and_every_entry_reaches_the_documentation():
    names = [metric.name for metric in catalogue.METRICS]
    assert len(names) == len(set(names))
    assert all(f"`{name}`" in catalogue.markdown() for name in names)


def test_an_exact_entry_describes_a_metric_before_one_with_a_placeholder():
    assert [getattr(catalogue.find(name), "name", None) for name in ("push/pause_seconds", "push/load_seconds")] == [
        "push/pause_seconds",
        "push/<phase>_seconds",
    ]


def test_a_metric_without_a_family_is_refused(scored, group):
    with pytest.raises(ValueError, match="loss"):
        step_metrics([group(scored(1.0))], version=0, seconds=1.0, generated_tokens=0, extra={"loss": 1.0})


def test_an_empty_step_divides_by_nothing():
    metrics = step_metrics([], version=0, seconds=0.0, generated_tokens=0)
    assert all(math.isfinite(value) for value in metrics.values())


def test_observed_tokens_are_in_no_count_of_sampled_tokens(scored, group):
    item = scored(1.0, segments=((0, 4),))
    seen = replace(item, rollout=replace(item.rollout, finish_reason=None).observed([7, 8]))
    metrics = step_metrics([group(seen)], version=0, seconds=2.0, generated_tokens=4)
    assert metrics["completions/length_mean"] == 4
    assert metrics["completions/observed_mean"] == 2
    assert metrics["staleness/masked_fraction"] == 0
    assert metrics["throughput/trained_tokens_per_second"] == 2
