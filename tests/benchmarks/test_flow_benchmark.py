"""The statement of ``benchmarks/flow.py``, on a shorter run than the program makes."""

from benchmarks.flow import measure


def test_failing_rollouts_and_heavy_tails_break_no_bound_and_cost_no_more_than_the_work_that_is_lost():
    result = measure(steps=120, failing=0.2)
    for run in result["runs"]:
        assert run["steps"] == 120
        assert run["stale"] == 0
        assert 0 < run["oldest"] <= result["max_versions"]
    assert result["runs"][1]["rollouts_failed"] > 200
    assert result["efficiency"] > 0.95
