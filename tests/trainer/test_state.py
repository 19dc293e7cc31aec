import json

import pytest

from trainer.checks import ConfigError
from trainer.config import Config
from trainer.state import STATE_FILE, RunState, checkpoint_path, checkpoints, commit, find_checkpoint, read_state


def write(run_dir, step: int, keep: int = 9):
    final = checkpoint_path(run_dir, step)
    temporary = final.with_name(f".{final.name}.writing")
    temporary.mkdir(parents=True)
    commit(temporary, final, RunState(step=step, model="auto", prompts={"cursor": step}, totals={}), keep)
    return final


def config(run_dir, resume: str = "auto") -> Config:
    return Config(name="x", task="x", steps=10, run_dir=str(run_dir), resume=resume)


def test_a_checkpoint_reads_back_what_was_written(tmp_path):
    assert read_state(write(tmp_path, 3)) == RunState(step=3, model="auto", prompts={"cursor": 3}, totals={})


def test_resume_auto_takes_the_newest_by_number_not_by_name(tmp_path):
    for step in (2, 10, 9):
        write(tmp_path, step)
    assert find_checkpoint(config(tmp_path)) == checkpoint_path(tmp_path, 10)


def test_a_torn_checkpoint_is_not_taken(tmp_path):
    whole = write(tmp_path, 1)
    checkpoint_path(tmp_path, 2).mkdir()
    assert find_checkpoint(config(tmp_path)) == whole


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_2", "step_3"]


def test_a_run_without_checkpoints_starts_afresh(tmp_path):
    assert find_checkpoint(config(tmp_path)) is None


def test_resume_never_starts_afresh_beside_checkpoints(tmp_path):
    write(tmp_path, 1)
    assert find_checkpoint(config(tmp_path, resume="never")) is None


def test_a_path_that_is_no_checkpoint_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="no checkpoint"):
        find_checkpoint(config(tmp_path, resume=str(tmp_path)))


def test_a_damaged_state_file_is_named(tmp_path):
    folder = write(tmp_path, 1)
    (folder / STATE_FILE).write_text(json.dumps({"step": 1}))
    with pytest.raises(ConfigError, match="step_1"):
        read_state(folder)
