"""Conditions over metrics: what they mean, and what is no condition."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.conditions import Condition, ConditionError, read_conditions

ROWS = [{"step": n + 1, "reward/mean": n / 10, "push/seconds": 2.0} for n in range(20)]
SUMMARY = {"status": "done", "wall_seconds": 12.5}


def verdict(text: str, rows=ROWS, summary=SUMMARY):
    return Condition(text).judge(rows, summary)


@pytest.mark.parametrize(
    ("condition", "seen"),
    [
        ('first("reward/mean") == 0', "0"),
        ('last("reward/mean") == 1.9', "1.9"),
        ('min("reward/mean") >= 0', "0"),
        ('max("reward/mean") <= 1.9', "1.9"),
        ('median("reward/mean") < 1', "0.95"),
        ('mean("reward/mean") < 1', "0.95"),
        ('sum("push/seconds") == 40', "40"),
        ('first10("reward/mean") < 0.46', "0.45"),
        ('last10("reward/mean") > 1.44', "1.45"),
        ('last500("push/seconds") == 2', "2"),
        ('last10("reward/mean") >= 2 * first10("reward/mean")', "1.45, 0.45"),
        ('0 < mean("reward/mean") + -0.5 < (mean("push/seconds") - 1) / 2', "0.95, 2"),
        ('summary("status") == "done"', "done"),
        ('summary("wall_seconds") < 60', "12.5"),
    ],
)
def test_a_condition_that_holds_shows_what_it_saw(condition, seen):
    found = verdict(condition)
    assert (found.passed, found.seen) == (True, seen)
    assert found.condition == condition


@pytest.mark.parametrize(
    "condition",
    [
        'last10("reward/mean") > 1.46',
        'summary("status") != "done"',
        'summary("status") > 1',
        '0 < mean("reward/mean") < 0.9',
        'mean("reward/mean") / 0 > 0',
    ],
)
def test_a_condition_that_does_not_hold_or_makes_no_sense_fails(condition):
    assert not verdict(condition).passed


@pytest.mark.parametrize("statistic", ["min", "max", "median", "mean", "sum", "last10", "last"])
@pytest.mark.parametrize("comparison", ["< 100", "> -100", "== 0", "!= 0"])
def test_a_value_that_was_not_finite_fails_every_comparison(statistic, comparison):
    rows = [*ROWS, {"step": 21, "reward/mean": None}]
    found = verdict(f'{statistic}("reward/mean") {comparison}', rows)
    assert not found.passed
    assert "nan" in found.seen


def test_a_metric_that_no_step_has_fails_and_names_the_nearest_that_one_has():
    found = verdict('mean("reward/man") > 0')
    assert not found.passed
    assert "`reward/mean`" in found.seen


@pytest.mark.parametrize(
    ("condition", "value"), [('mean("reward/mean") > 0', "much"), ('sum("reward/mean") > 0', 1e308)]
)
def test_values_that_no_run_writes_fail_a_condition_and_not_the_program(condition, value):
    assert not verdict(condition, rows=[{"reward/mean": value}] * 2).passed


def test_a_summary_that_a_killed_run_never_wrote_fails_its_conditions():
    assert "no `status`" in verdict('summary("status") == "done"', summary={}).seen


def test_steps_without_the_metric_do_not_count():
    rows = [{"eval/reward_mean": 0.5}, {}, {"eval/reward_mean": 0.7}]
    assert verdict('first("eval/reward_mean") < last("eval/reward_mean")', rows).passed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read"),
        ('mean("reward/mean")', "compares nothing"),
        ("reward > 0.6", "`reward` is not allowed"),
        ('lst10("reward/mean") > 0.6', "`last10`"),
        ("mean(reward) > 0", "in quotes"),
        ('mean("a", "b") > 0', "in quotes"),
        ('mean("reward/mean") > True', "neither a number nor a text"),
        ('mean("reward/mean") in (1, 2)', "compare with"),
        ('mean("reward/mean") ** 9 > 0', "not allowed"),
        ('__import__("os") == 0', "no function is called"),
        ('(lambda: 1)() == 1', "not allowed"),
        ('mean("reward/mean").real == 1', "not allowed"),
        ('first0("reward/mean") > 1', "no function is called"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_condition_is_refused_with_what_is_wrong_in_it(text, words):
    with pytest.raises(ConditionError, match="`"):
        Condition(text)
    with pytest.raises(ConditionError) as error:
        Condition(text)
    assert words in str(error.value)


def test_a_metric_that_does_not_exist_is_refused_before_anything_runs():
    with pytest.raises(ConditionError, match="`staleness/token_max`"):
        read_conditions(['max("stalenes/token_max") < 3'])


@given(st.text(max_size=40))
def test_any_text_is_a_condition_or_refused(text):
    with contextlib.suppress(ConditionError):
        Condition(text).judge(ROWS, SUMMARY)
