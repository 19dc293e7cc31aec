"""What a page keeps of a long run."""

from __future__ import annotations

from trainer.report.rollouts import TOKENS, interesting, runs, spread, view
from trainer.report.series import charts, columns, derived, rounded


def row(versions=(0, 0), reward=0.0, finish="stop", ids=None, **more):
    size = len(versions)
    columns = {"response_token_ids": ids or list(range(size)), "versions": list(versions), "logprobs": [-0.5] * size}
    scores = {"reward": reward, "advantage": 0.5, "finish_reason": finish}
    return {"step": 5, **columns, "loss_mask": [True] * size, **scores, **more}


def test_a_long_run_keeps_means_largest_and_smallest_values():
    rows = [{"step": step, "reward/mean": float(step), "reward/max": float(step), "reward/min": float(step)}
            for step in range(1, 1001)]  # fmt: skip
    kept = columns(rows, points=400)
    assert len(kept.values["step"]) == 334
    assert kept.values["step"][:2] == [3, 6]
    assert kept.values["reward/mean"][:2] == [2, 5]
    assert kept.values["reward/max"][:2] == [3, 6]
    assert kept.values["reward/min"][:2] == [1, 4]


def test_a_spike_of_one_step_in_a_long_run_is_not_lost_in_a_mean():
    rows = [{"step": step, "push/pause_seconds": 30.0 if step == 500 else 1.0, "engines/serving": 2.0}
            for step in range(1, 1001)]  # fmt: skip
    kept = columns(rows, points=100)
    place = kept.values["step"].index(500)
    assert kept.values["push/pause_seconds"][place] == 3.9
    lows, highs = kept.extremes["push/pause_seconds"]
    assert (lows[place], highs[place]) == (1, 30)
    assert (lows[0], highs[0]) == (1, 1)
    assert set(kept.extremes) == {"push/pause_seconds"}, "what never changes has none"
    assert columns(rows[:100], points=100).extremes == {}, "neither has a run whose steps are points of their own"


def test_a_metric_that_some_steps_lack_has_gaps_and_one_that_is_no_number_is_no_column():
    kept = columns([{"step": 1, "policy/loss": 0.5, "x": "text"}, {"step": 2, "policy/loss": None, "x": True}])
    assert kept.values == {"step": [1, 2], "policy/loss": [0.5, None]}


def test_the_rest_of_a_step_is_what_no_part_took_and_never_negative():
    assert derived({"timing/step_seconds": 10.0, "push/seconds": 1.0, "idle/learner_seconds": 2.0}) == {
        "timing/rest_seconds": 7.0
    }
    assert derived({"timing/step_seconds": 1.0, "push/seconds": 2.0})["timing/rest_seconds"] == 0.0


def test_numbers_keep_five_digits():
    assert [rounded(value) for value in (0.1234567, 2.0, 123456.7, None)] == [0.12346, 2, 123460, None]


def test_parts_of_the_reward_and_ages_are_charts_without_being_named_one_by_one():
    shown = {chart["title"]: chart for chart in charts(["reward/mean", "reward/exact", "reward/failed",
             "by_lag/10/k3_kl", "by_lag/2/k3_kl", "by_lag/0/k3_kl"])}  # fmt: skip
    assert shown["Parts of the reward"]["metrics"] == ["reward/exact"]
    assert shown["Mismatch by age (k3)"]["metrics"] == ["by_lag/0/k3_kl", "by_lag/2/k3_kl", "by_lag/10/k3_kl"]
    assert "Entropy" not in shown


def test_rollouts_of_several_versions_high_low_and_cut_ones_are_chosen_first():
    rows = [row(reward=0.5, ids=[9, n]) for n in range(20)]
    rows += [row((1, 2)), row(reward=1.0, ids=[3, 3]), row(reward=-1.0, ids=[4, 4]), row(finish="length", ids=[5, 5])]
    chosen = interesting(rows, 4)
    assert [reasons for _, reasons in chosen] == [
        ["most versions"],
        ["highest reward"],
        ["lowest reward"],
        ["truncated"],
    ]
    assert [chosen[0][0]["versions"], chosen[1][0]["reward"], chosen[2][0]["reward"]] == [[1, 2], 1.0, -1.0]


def test_equal_responses_are_chosen_once_where_there_are_others():
    rows = [row(reward=1.0)] * 5 + [row(reward=0.0, ids=[7, 7]), row(reward=0.2, ids=[8, 8])]
    assert sorted(chosen["reward"] for chosen, _ in interesting(rows, 3)) == [0.0, 0.2, 1.0]


def test_steps_are_spread_over_the_run_with_its_ends():
    assert spread(list(range(1, 101)), 3) == [1, 51, 100]
    assert spread([5, 10], 3) == [5, 10]


def test_a_long_response_keeps_its_beginning_and_its_end_with_their_versions():
    length = TOKENS + 500
    shown = view(row([0] * (length - 1) + [3], ids=list(range(length))), [], None)
    assert shown["left_out"] == [TOKENS - TOKENS // 3, 500]
    assert shown["pieces"][-1] == length - 1
    assert shown["versions"] == [(0, TOKENS - 1), (3, 1)]


def test_tokens_of_the_environment_and_masked_ones_are_marked():
    shown = view(row([0] * 5, observations=[[1, 3]]) | {"loss_mask": [True, False, False, False, True]}, [], None)
    assert shown["kinds"] == [("trained", 1), ("observed", 2), ("masked", 1), ("trained", 1)]


def test_runs_of_equal_values():
    assert runs([1, 1, 2, 1]) == [(1, 2), (2, 1), (1, 1)]
