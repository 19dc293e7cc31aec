"""What an earlier run has left in the run folder, and what this one makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainer.checkpoint_folder import STATE_FILE, checkpoint_path
from trainer.checks import ConfigError
from trainer.config import CheckpointConfig, Config
from trainer.earlier_run import begins_again, is_done
from trainer.state import RunState, find_checkpoint


def config(run_dir: Path, resume: str = "auto", steps: int = 10) -> Config:
    return Config(name="x", task="x", steps=steps, run_dir=str(run_dir), resume=resume)


class TestARunKilledBeforeItsFirstCheckpoint:
    @pytest.fixture
    def run_dir(self, tmp_path):
        (tmp_path / "config.yaml").write_text("name: x\ntask: x\nseed: 0\nmodel:\n  path: auto\n")
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
        (tmp_path / "checkpoints" / ".step_2.writing").mkdir(parents=True)
        return tmp_path

    def begins(self, run_dir, every=2, **changes):
        return begins_again(replace(config(run_dir, **changes), checkpoint=CheckpointConfig(every=every)))

    def test_begins_again(self, run_dir):
        assert self.begins(run_dir)

    def test_does_not_where_more_would_be_lost_than_a_checkpoint_promises(self, run_dir):
        assert not self.begins(run_dir, every=1)
        assert not self.begins(run_dir, every=0)

    def test_does_not_over_results_of_another_run(self, run_dir):
        assert not begins_again(replace(config(run_dir), name="y", checkpoint=CheckpointConfig(every=2)))

    def test_does_not_unless_it_resumes_by_itself(self, run_dir):
        assert not self.begins(run_dir, resume="never")

    def test_does_not_over_a_finished_run(self, run_dir):
        (run_dir / "export").mkdir()
        assert not self.begins(run_dir)

    def test_does_not_over_a_checkpoint_that_has_lost_files(self, run_dir):
        (run_dir / "checkpoints" / "step_2").mkdir()
        assert not self.begins(run_dir)

    def test_does_not_where_the_run_began_from_a_checkpoint_of_another(self, run_dir):
        with (run_dir / "config.yaml").open("a") as file:
            file.write("resume: /other/checkpoints/step_20\n")
        assert not self.begins(run_dir)


@pytest.mark.parametrize(
    ("summary", "steps", "done"),
    [
        ('{"status": "done", "steps": 10}', 10, True),
        ('{"status": "done", "steps": 10}', 12, False),
        ('{"status": "interrupted", "steps": 10}', 10, False),
        ('{"status": "do', 10, False),
        ("null", 10, False),
        ("[]", 10, False),
        (None, 10, False),
    ],
)
def test_a_run_is_done_when_its_last_step_and_its_end_are_on_the_disk(tmp_path, summary, steps, done):
    if summary is not None:
        (tmp_path / "summary.json").write_text(summary)
    state = RunState(step=10, model="m", prompts={}, totals={})
    assert is_done(config(tmp_path, steps=steps), state) == done


class TestACheckpointOfOneRunAndTheFolderOfAnother:
    @pytest.fixture
    def checkpoint(self, tmp_path):
        return self.written(tmp_path / "first", 2)

    @pytest.fixture
    def other(self, tmp_path):
        """The folder of a run that made five steps."""
        self.written(tmp_path / "other", 5)
        (tmp_path / "other" / "metrics.jsonl").write_text('{"step": 5}\n')
        return tmp_path / "other"

    def written(self, run_dir, step):
        path = checkpoint_path(run_dir, step)
        path.mkdir(parents=True)
        (path / STATE_FILE).write_text("{}")
        return path

    def test_are_refused_because_steps_of_the_other_run_would_be_removed(self, checkpoint, other):
        with pytest.raises(ConfigError, match=r"metrics\.jsonl, checkpoints of a run that did not begin from") as error:
            find_checkpoint(config(other, resume=str(checkpoint)))
        assert "run_dir" in str(error.value)

    def test_go_together_where_the_folder_is_new(self, checkpoint, tmp_path):
        assert find_checkpoint(config(tmp_path / "new", resume=str(checkpoint))) == checkpoint

    def test_go_together_where_the_other_run_began_from_it(self, checkpoint, other):
        """The same command once more."""
        (other / "config.yaml").write_text(f"resume: {checkpoint}\n")
        assert find_checkpoint(config(other, resume=str(checkpoint))) == checkpoint

    def test_are_one_run_where_the_checkpoints_are_kept_on_another_disk(self, other, tmp_path):
        (other / "checkpoints").rename(tmp_path / "disk")
        (other / "checkpoints").symlink_to(tmp_path / "disk")
        newest = checkpoint_path(other, 5)
        assert find_checkpoint(config(other, resume=str(newest))) == newest
