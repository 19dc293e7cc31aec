"""The page of learning curves, from results that are there already."""

import json
import re
from dataclasses import asdict
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import learning_curves
from benchmarks.curves_page import against_rollouts, against_seconds, table, write_page
from benchmarks.learning_curves import PRESETS, Run, claim, from_metrics, load_runs, run_all
from benchmarks.svg import Curve, small_multiples, tick_step

SETTINGS = {"overrides": ["steps=10"], "machine": "a machine", "commit": "abc", "jobs": 2}


def run(preset: str, seed: int, top: float = 0.8) -> Run:
    rewards = [top * (step + 1) / 10 + 0.1 * seed for step in range(10)]
    return Run(preset, seed, rewards, [32.0 * (step + 1) for step in range(10)],
               [(1.0 + seed) * (step + 1) for step in range(10)], 30.0, 45.0)  # fmt: skip


def test_rollouts_and_seconds_add_up_over_the_steps_and_what_is_left_of_the_wall_time_is_the_start():
    rows = [
        {"reward/share_of_a": 0.1 * n, "timing/step_seconds": 2.0, "throughput/rollouts_per_second": 16.0}
        for n in range(3)
    ]
    made = from_metrics("grpo", 4, rows, wall=36.0)
    assert made == Run("grpo", 4, [0.0, 0.1, 0.2], [32, 64, 96], [2.0, 4.0, 6.0], 30.0, 36.0)


def test_a_run_that_is_there_is_not_repeated_and_a_failed_one_does_not_end_the_others(tmp_path, monkeypatch):
    made = []

    def run_once(preset, seed, overrides, log):
        log.write_text("")
        made.append((preset, seed, *overrides))
        if preset == "gspo":
            raise RuntimeError("it broke")
        return run(preset, seed)

    monkeypatch.setattr(learning_curves, "run_once", run_once)
    jobs = [("grpo", 0), ("gspo", 0), ("grpo", 1)]
    (tmp_path / "grpo.seed_0.json").write_text(json.dumps(asdict(run("grpo", 0))))
    assert run_all(tmp_path, jobs, ["steps=10"], side_by_side=1) == ["it broke"]
    assert made == [("gspo", 0, "steps=10"), ("grpo", 1, "steps=10")]
    assert load_runs(tmp_path) == [run("grpo", 0), run("grpo", 1)]
    assert run_all(tmp_path, jobs, [], side_by_side=2) == ["it broke"], "only the failed one is tried again"


def test_runs_of_other_steps_do_not_come_into_the_same_folder(tmp_path):
    claim(tmp_path / "new", SETTINGS)
    claim(tmp_path / "new", SETTINGS | {"commit": "def"})
    with pytest.raises(SystemExit, match=r"holds runs with steps=10, not with steps=20"):
        claim(tmp_path / "new", SETTINGS | {"overrides": ["steps=20"]})


def test_the_page_has_a_row_a_preset_and_both_pictures_a_panel(tmp_path):
    runs = [run(preset, seed) for preset in PRESETS for seed in range(3)]
    page = write_page(tmp_path, runs, SETTINGS).read_text()
    assert re.findall(r"^\| `(\w+)` \| 3 \|", page, flags=re.MULTILINE) == list(PRESETS)
    for name in ("rollouts", "seconds"):
        assert f"(learning-curves-{name}.svg)" in page
        picture = ElementTree.parse(tmp_path / f"learning-curves-{name}.svg")
        texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
        assert [text for text in texts if text in PRESETS] == list(PRESETS)
        assert len(list(picture.iter("{http://www.w3.org/2000/svg}polygon"))) == len(PRESETS)


def test_the_table_says_mean_and_deviation_over_the_seeds_of_first_middle_and_last_steps():
    row = table({"grpo": [run("grpo", 0), run("grpo", 1), run("grpo", 2)]}).splitlines()[-1]
    # First five steps: 0.08 to 0.4, mean 0.24, and 0.1 more a seed; middle: steps 4 to 8; last: 6 to 10.
    assert row == "| `grpo` | 3 | 0.34 ± 0.10 | 0.58 ± 0.10 | 0.74 ± 0.10 | 20 ± 10 | 30 ± 0 |"


def test_seeds_that_took_different_times_are_compared_at_the_same_second():
    curve = against_seconds("grpo", [run("grpo", 0, 1.0), run("grpo", 1, 1.0)])
    assert (curve.x[0], curve.x[-1]) == (1.0, 20.0)
    assert curve.mean[0] == pytest.approx((0.1 + 0.2) / 2)  # the other's first step is still to come
    assert curve.mean[-1] == pytest.approx((1.0 + 1.1) / 2)  # one has ended long ago
    at_ten = pytest.approx((1.0 + 0.6) / 2, abs=0.01)
    assert float(np.interp(10.0, curve.x, curve.mean)) == at_ten
    assert against_rollouts("grpo", [run("grpo", 0)]).spread == [0.0] * 10


@pytest.mark.parametrize(("most", "step"), [(1.0, 0.25), (0.83, 0.25), (0.75, 0.2), (1280.0, 400.0), (0.0, 0.25)])
def test_ticks_are_round_and_reach_the_largest_value(most, step):
    assert tick_step(most) == pytest.approx(step)
    assert tick_step(most) * 4 >= most


def test_what_a_curve_is_called_cannot_break_the_picture():
    picture = small_multiples([Curve("a < b & c", [1.0, 2.0], [0.1, 0.2], [0.0, 0.3])], "t", "x", "y")
    assert "a < b & c" in [element.text for element in ElementTree.fromstring(picture).iter()]
