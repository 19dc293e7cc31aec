import json
from contextlib import nullcontext
from dataclasses import replace

import pytest

from generator.rollout import Prompt, Rollout
from generator.task import DataError
from tests.trainer.learner_files import FILES
from trainer.adapter_record import AdapterRecord
from trainer.checkpoint_folder import FILES_FILE, STATE_FILE, check_room, checkpoint_path, checkpoints, torn
from trainer.checks import ConfigError
from trainer.config import CheckpointConfig, Config, LearnerConfig
from trainer.data import PromptStream
from trainer.groups import KeptGroups, StartedGroup
from trainer.state import (
    LEARNER_FOLDER,
    RunState,
    begins_again,
    commit,
    find_checkpoint,
    is_done,
    load_state,
)
from trainer.watch.totals import RunningTotals

TOTALS = {"totals": RunningTotals().state_dict(), "version": 1, "wall_seconds": 1.0}


def write(run_dir, step: int, keep: int = 9, prompts=None, kept=KeptGroups(first_number=7)):  # noqa: B008 - frozen
    final = checkpoint_path(run_dir, step)
    temporary = final.with_name(f".{final.name}.writing")
    temporary.mkdir(parents=True)
    position = (prompts or stream()).state_dict()
    state = RunState(step=step, model="auto", prompts=position, totals=TOTALS, next_group=kept.first_number)
    commit(temporary, final, state, kept, CheckpointConfig(keep=keep))
    return final


def config(run_dir="x", resume: str = "auto", steps: int = 10) -> Config:
    return Config(name="x", task="x", steps=steps, run_dir=str(run_dir), resume=resume)


def stream(seed: int = 0) -> PromptStream:
    return PromptStream([Prompt(number, (number,), "", {}) for number in range(5)], seed=seed)


def test_a_checkpoint_reads_back_what_was_written(tmp_path):
    state, kept = load_state(write(tmp_path, 3), config(), stream())
    assert state == RunState(step=3, model="auto", prompts=stream().state_dict(), totals=TOTALS, next_group=7)
    assert kept == KeptGroups(first_number=7)


def test_resume_auto_takes_the_newest_by_number_not_by_name(tmp_path):
    for step in (2, 9, 10):
        write(tmp_path, step)
    assert find_checkpoint(config(tmp_path)) == checkpoint_path(tmp_path, 10)


def test_a_torn_checkpoint_is_not_taken(tmp_path):
    whole = write(tmp_path, 1)
    checkpoint_path(tmp_path, 2).mkdir()
    assert find_checkpoint(config(tmp_path)) == whole


@pytest.mark.parametrize("damage", ["cut", "gone", "listing"])
def test_a_checkpoint_that_is_not_whole_is_skipped_and_named(tmp_path, damage, capsys):
    whole, newer = write(tmp_path, 1), write(tmp_path, 2)
    if damage == "cut":
        (newer / "rollouts.jsonl").write_text("{")
    elif damage == "gone":
        (newer / "rollouts.jsonl").unlink()
    else:
        (newer / FILES_FILE).write_text("[")
    assert find_checkpoint(config(tmp_path)) == whole
    assert str(newer) in capsys.readouterr().err
    with pytest.raises(ConfigError, match="not whole"):
        find_checkpoint(config(tmp_path, resume=str(newer)))


def test_a_run_none_of_whose_checkpoints_is_whole_is_not_begun_again_over_its_results(tmp_path):
    (write(tmp_path, 1) / "rollouts.jsonl").unlink()
    with pytest.raises(ConfigError, match="no checkpoint of the run is whole"):
        find_checkpoint(config(tmp_path))


def test_a_checkpoint_from_before_files_were_listed_counts_as_whole(tmp_path):
    old = write(tmp_path, 1)
    (old / FILES_FILE).unlink()
    assert torn(old) is None
    assert find_checkpoint(config(tmp_path)) == old


def test_a_kill_while_a_checkpoint_replaces_one_of_the_same_step_leaves_the_older_one(tmp_path):
    path = write(tmp_path, 4)
    path.rename(path.with_name(".step_4.replaced"))
    assert find_checkpoint(config(tmp_path)) == path


def test_a_checkpoint_of_a_step_replaces_the_one_there_was(tmp_path):
    first = (write(tmp_path, 4) / STATE_FILE).stat().st_ino
    assert (write(tmp_path, 4) / STATE_FILE).stat().st_ino != first
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_4"]


def test_a_disk_without_room_for_another_checkpoint_is_found_before_one_is_written(tmp_path, monkeypatch):
    check_room(tmp_path)
    write(tmp_path, 1)
    check_room(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 3})())
    with pytest.raises(OSError, match="a checkpoint takes"):
        check_room(tmp_path)


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


def test_checkpoints_of_a_branch_that_was_left_go_away(tmp_path):
    for step in (1, 2, 20):
        write(tmp_path, step)
    write(tmp_path, 3, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_2", "step_3"]


@pytest.mark.parametrize(
    "damage",
    [{"step": "x"}, {"totals": []}, {"prompts": None}, {"prompts": {}}, {"unknown": 1}],
    ids=str,
)
def test_a_damaged_state_file_is_named(tmp_path, damage):
    folder = write(tmp_path, 1)
    state = json.loads((folder / STATE_FILE).read_text())
    (folder / STATE_FILE).write_text(json.dumps(state | damage))
    with pytest.raises(ConfigError, match="step_1 cannot be read"):
        load_state(folder, config(), stream())


@pytest.mark.parametrize(("penalty", "tokens"), [(0.0, 1), (0.5, 0)])
def test_what_cannot_be_continued_exactly_begins_again_and_finished_rollouts_stay(penalty, tokens, tmp_path):
    prompts = stream()
    prompt = prompts.next()
    partial = Rollout("0-0", prompt.token_ids, (5,), (-1.0,), (0,), (True,))
    kept = KeptGroups(started=(StartedGroup(prompt, (partial, replace(partial, finish_reason="stop")), 0),))
    folder = write(tmp_path, 1, prompts=prompts, kept=kept)
    penalised = config()
    penalised.sampling.presence_penalty = penalty
    _, loaded = load_state(folder, penalised, stream())
    assert [len(one.response_token_ids) for one in loaded.started[0].rollouts] == [tokens, 1]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    other = config()
    other.model.path = "/models/other"
    with pytest.raises(ConfigError, match="/models/other"):
        load_state(write(tmp_path, 1), other, stream())


def test_a_checkpoint_of_what_model_path_names_elsewhere_is_refused_with_both_models(tmp_path):
    folder = write(tmp_path, 1)
    state = json.loads((folder / STATE_FILE).read_text()) | {"model_source": "embedded SmolLM2"}
    (folder / STATE_FILE).write_text(json.dumps(state))
    load_state(folder, config(), stream(), "embedded SmolLM2")
    with pytest.raises(ConfigError, match=r"of the embedded SmolLM2, and here `model\.path=auto` is the hub model;"):
        load_state(folder, config(), stream(), "hub model")


def test_a_checkpoint_past_the_planned_steps_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="past `steps=4`"):
        load_state(write(tmp_path, 5), config(steps=4), stream())


def test_a_checkpoint_of_other_adapters_or_ranks_is_refused_before_engines_are_started(tmp_path):
    folder = write(tmp_path, 1)
    adapted = config()
    adapted.learner.lora.rank = 4
    AdapterRecord(adapted.learner.lora, "base", "float32").write(folder / LEARNER_FOLDER, parts=1)
    load_state(folder, adapted, stream())
    with pytest.raises(ConfigError, match=r"trains all weights .* take another run_dir"):
        load_state(folder, config(), stream())
    adapted.learner.ranks = 2
    with pytest.raises(ConfigError, match=r"made with learner\.ranks=1"):
        load_state(folder, adapted, stream())


def test_a_checkpoint_of_another_data_order_is_refused(tmp_path):
    with pytest.raises(DataError, match="seed"):
        load_state(write(tmp_path, 1), config(), stream(seed=1))


@pytest.mark.parametrize(
    ("summary", "steps", "done"),
    [
        ('{"status": "done", "steps": 10}', 10, True),
        ('{"status": "done", "steps": 10}', 12, False),
        ('{"status": "interrupted", "steps": 10}', 10, False),
        ('{"status": "do', 10, False),
        (None, 10, False),
    ],
)
def test_a_run_is_done_when_its_last_step_and_its_end_are_on_the_disk(tmp_path, summary, steps, done):
    if summary is not None:
        (tmp_path / "summary.json").write_text(summary)
    state = RunState(step=10, model="m", prompts={}, totals={})
    assert is_done(config(tmp_path, steps=steps), state) == done


@pytest.mark.parametrize(
    ("written", "stage", "refused"),
    [
        (2, 3, True),
        (3, 2, True),
        (0, 2, True),
        (3, 0, True),
        (0, 0, False),
        (2, 1, False),
        (2, 0, False),
        (3, 3, False),
    ],
)
def test_a_learner_of_another_zero_stage_is_refused_before_anything_is_started(tmp_path, written, stage, refused):
    """Stage 0 may turn out to be 1: it does in bfloat16."""
    folder = write(tmp_path, 1)
    (folder / "learner" / "learner").mkdir(parents=True)
    for name in FILES[written]:
        (folder / "learner" / "learner" / name).touch()
    run = replace(config(), learner=LearnerConfig(zero_stage=stage))
    with pytest.raises(ConfigError, match=r"learner\.zero_stage.*the stage must stay") if refused else nullcontext():
        load_state(folder, run, stream())
