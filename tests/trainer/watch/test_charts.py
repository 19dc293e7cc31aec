"""The charts name what runs write."""

from __future__ import annotations

from collections import Counter

import pytest

from trainer.watch.catalogue import EVALUATION, METRICS, find
from trainer.watch.charts import CHARTS, DERIVED, matching, meaning, pattern


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_every_metric_of_a_chart_is_in_the_catalogue_in_the_unit_of_the_chart(chart):
    for name in set(chart.names) - DERIVED.keys():
        assert find(name) is not None, name
        assert chart.unit.startswith(find(name).unit), name
    evaluated = {metric.name for metric in EVALUATION}
    assert set(chart.points) <= evaluated
    assert not set(chart.metrics) & evaluated


def test_titles_tell_charts_apart():
    assert max(Counter(chart.title for chart in CHARTS).values()) == 1


def test_a_placeholder_stands_for_what_has_no_entry_of_its_own():
    times = [f"timing/{part}_seconds" for part in ("step", "rest", "b", "train", "a")]
    names = [*times, "push/pause_seconds", "push/gate_seconds", "reward/mean", "reward/exact", "eval/pass@16",
             "eval/pass@2"]  # fmt: skip
    assert matching(["timing/<part>_seconds"], names) == ["timing/a_seconds", "timing/b_seconds"]
    assert matching(["push/gate_seconds", "push/<phase>_seconds"], names) == ["push/gate_seconds"]
    assert matching(["reward/<part>"], names) == ["reward/exact"]
    assert matching(["eval/pass@<k>"], names) == ["eval/pass@2", "eval/pass@16"]
    assert matching(["timing/rest_seconds", "nothing"], names) == ["timing/rest_seconds"]


def test_a_pattern_matches_the_names_that_an_entry_stands_for_as_wholes():
    assert pattern("by_lag/<lag>/k3_kl") == "by_lag/[^/]+/k3_kl"
    assert pattern("a.b/<x>") == r"a\.b/[^/]+"


def test_every_metric_has_its_words():
    assert all(meaning(name) for chart in CHARTS for name in chart.names)
    assert meaning("nothing/at_all") == ""
    assert {metric.name for metric in METRICS}.isdisjoint(DERIVED), "what a run writes is not computed again"
