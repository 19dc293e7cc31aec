"""The best checkpoint: chosen among those whose version has a value, kept beside the newest, right after a restart."""

import json
import math

import pytest

from generator.rollout import Prompt
from trainer.best_checkpoint import best_of, find_best, record_best
from trainer.checkpoint_folder import FILES_FILE, checkpoint_path, checkpoints, leave_branch
from trainer.config import CheckpointConfig
from trainer.data import PromptStream
from trainer.groups import KeptGroups
from trainer.state import RunState, commit, find_checkpoint
from trainer.watch.run_folder import RunFolder
from trainer.watch.totals import RunningTotals

METRIC = "eval/reward_mean"


def checkpoint(run_dir, step: int, keep: int = 2, best: str | None = METRIC, in_evaluation: int | None = None) -> None:
    final = checkpoint_path(run_dir, step)
    temporary = final.with_name(f".{final.name}.writing")
    temporary.mkdir(parents=True)
    position = PromptStream([Prompt(0, (1,), "", {})], seed=0).state_dict()
    totals = {"totals": RunningTotals().state_dict(), "version": step, "wall_seconds": 1.0}
    kept = KeptGroups(first_number=1)
    settings = CheckpointConfig(keep=keep, best=best)
    commit(temporary, final, RunState(step, "auto", position, totals, 1), kept, settings, in_evaluation)


def evaluate(run_dir, **values: float | None) -> None:
    """Values by version, written ``v3=0.5``."""
    with (run_dir / "evaluations.jsonl").open("a") as file:
        for name, value in values.items():
            file.write(json.dumps({"step": int(name[1:]), METRIC: value}) + "\n")


def rewind(run_dir, step: int) -> None:
    """A run continues from ``step``."""
    folder = RunFolder(run_dir, resume_step=step)
    folder.rewind()
    folder.close()


def names(run_dir) -> list[str]:
    return [path.name for path in checkpoints(run_dir)]


def best(run_dir) -> dict:
    return json.loads((run_dir / "checkpoints" / "best.json").read_text())


def test_the_largest_value_is_the_best_and_the_newest_of_equals():
    values = {1: 0.5, 2: 0.9, 3: 0.9, 4: 0.1, 5: math.nan}
    assert best_of(values, [1, 2, 3, 4, 5, 6]) == 3
    assert best_of(values, [1, 4, 6]) == 1
    assert best_of(values, [5, 6]) is None


def test_the_best_checkpoint_is_kept_beside_the_newest_and_named_with_its_value(tmp_path):
    for step, value in enumerate([0.2, 0.8, 0.3, 0.5, 0.4], start=1):
        checkpoint(tmp_path, step, keep=1)
        evaluate(tmp_path, **{f"v{step}": value})  # an evaluation ends behind the checkpoint of its version
    checkpoint(tmp_path, 6, keep=1)
    assert names(tmp_path) == ["step_2", "step_6"]
    assert best(tmp_path) == {"checkpoint": "step_2", "step": 2, "metric": METRIC, "value": 0.8}


def test_the_checkpoint_of_the_version_that_is_being_evaluated_stays_until_its_value_is_known(tmp_path):
    checkpoint(tmp_path, 1, keep=1)
    for step in (2, 3):
        checkpoint(tmp_path, step, keep=1, in_evaluation=1)
    assert names(tmp_path) == ["step_1", "step_3"]
    evaluate(tmp_path, v1=0.5)
    checkpoint(tmp_path, 4, keep=1)
    assert names(tmp_path) == ["step_1", "step_4"]


def test_a_better_one_takes_the_place_of_the_best(tmp_path):
    for step, value in enumerate([0.2, 0.8, 0.3, 0.9], start=1):
        checkpoint(tmp_path, step, keep=1)
        evaluate(tmp_path, **{f"v{step}": value})
    checkpoint(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step_4", "step_5"]
    assert best(tmp_path)["step"] == 4


def test_an_evaluation_that_ends_between_two_checkpoints_is_recorded_at_once(tmp_path):
    checkpoint(tmp_path, 1)
    evaluate(tmp_path, v0=0.99, v1=0.5)
    assert record_best(tmp_path, METRIC) == checkpoint_path(tmp_path, 1)
    assert best(tmp_path)["value"] == 0.5


def test_the_run_continues_from_the_newest_not_from_the_best(tmp_path):
    for step, value in enumerate([0.9, 0.1, 0.1], start=1):
        checkpoint(tmp_path, step, keep=1)
        evaluate(tmp_path, **{f"v{step}": value})
    from trainer.config import Config

    assert find_checkpoint(Config(name="x", task="x", steps=9, run_dir=str(tmp_path))).name == "step_3"


def test_without_a_value_only_the_newest_are_kept_and_nothing_is_named(tmp_path):
    evaluate(tmp_path, v2=None)
    for step in (1, 2, 3):
        checkpoint(tmp_path, step, keep=1)
    assert names(tmp_path) == ["step_3"]
    assert not (tmp_path / "checkpoints" / "best.json").exists()
    assert record_best(tmp_path / "nothing", METRIC) is None


def test_no_best_is_kept_where_none_is_asked_for(tmp_path):
    evaluate(tmp_path, v1=0.9)
    for step in (1, 2):
        checkpoint(tmp_path, step, keep=1, best=None)
    assert names(tmp_path) == ["step_2"]


def test_a_metric_of_training_is_that_of_the_checkpoints_last_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.7}\n{"step": 2, "reward/mean": 0.1}\n{"ste')
    for step in (1, 2):
        checkpoint(tmp_path, step, keep=1, best="reward/mean")
    assert names(tmp_path) == ["step_1", "step_2"]
    assert best(tmp_path)["value"] == 0.7


def test_a_checkpoint_that_is_not_whole_is_never_the_best(tmp_path):
    evaluate(tmp_path, v1=0.9, v2=0.5)
    for step in (1, 2):
        checkpoint(tmp_path, step)
    (checkpoint_path(tmp_path, 1) / "rollouts.jsonl").unlink()
    found = find_best(tmp_path, METRIC)
    assert found is not None
    assert found.step == 2
    (checkpoint_path(tmp_path, 2) / FILES_FILE).write_text("[")
    assert find_best(tmp_path, METRIC) is None


@pytest.mark.parametrize("resumed", [1, 2, 3])
def test_after_a_restart_from_an_older_checkpoint_the_best_is_one_of_what_the_run_was_rewound_to(tmp_path, resumed):
    for step, value in enumerate([0.2, 0.4, 0.9], start=1):
        checkpoint(tmp_path, step, keep=3)
        evaluate(tmp_path, **{f"v{step}": value})
    rewind(tmp_path, resumed)
    leave_branch(tmp_path, resumed)
    record_best(tmp_path, METRIC)
    assert best(tmp_path)["step"] == resumed


def test_a_checkpoint_of_a_branch_that_was_left_does_not_get_the_value_of_the_new_one(tmp_path):
    for step in (1, 2, 3):
        checkpoint(tmp_path, step, keep=3)
    rewind(tmp_path, 1)
    leave_branch(tmp_path, 1)
    assert names(tmp_path) == ["step_1"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3, "nothing is lost before there is a new one"
    evaluate(tmp_path, v1=0.5, v2=0.9)
    record_best(tmp_path, METRIC)
    assert best(tmp_path)["step"] == 1
    checkpoint(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step_1", "step_3"]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_1", "step_3", "best.json"}


def test_a_damaged_note_of_the_best_checkpoint_is_written_anew(tmp_path):
    checkpoint(tmp_path, 1)
    evaluate(tmp_path, v1=0.5)
    (tmp_path / "checkpoints" / "best.json").write_bytes(b"\xff\x00")
    record_best(tmp_path, METRIC)
    assert best(tmp_path)["step"] == 1
