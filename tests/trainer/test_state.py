import asyncio
import json
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from generator.rollout import Prompt, Rollout
from generator.task import DataError
from tests.trainer.learner_files import FILES
from tests.trainer.loop_doubles import Learner, parts
from trainer.adapter_record import AdapterRecord
from trainer.checkpoint_folder import (
    FILES_FILE,
    STATE_FILE,
    check_room,
    checkpoint_path,
    checkpoints,
    move_into_place,
    torn,
)
from trainer.checks import ConfigError
from trainer.config import CheckpointConfig, Config, LearnerConfig
from trainer.data import PromptStream
from trainer.groups import KeptGroups, StartedGroup
from trainer.learner_error import LearnerError
from trainer.run import load_learner
from trainer.state import (
    LEARNER_FOLDER,
    RunState,
    commit,
    find_checkpoint,
    load_state,
    save_checkpoint,
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


@pytest.mark.parametrize("damage", ["cut", "gone", "zeros", "listing"])
def test_a_checkpoint_that_is_not_whole_is_skipped_and_named(tmp_path, damage, capsys):
    whole, newer = write(tmp_path, 1), write(tmp_path, 2)
    if damage == "cut":
        (newer / "rollouts.jsonl").write_text("{")
    elif damage == "gone":
        (newer / "rollouts.jsonl").unlink()
    elif damage == "zeros":
        (newer / STATE_FILE).write_bytes(bytes((newer / STATE_FILE).stat().st_size))
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


@pytest.mark.parametrize("lost", [STATE_FILE, FILES_FILE])
def test_a_checkpoint_that_has_lost_its_state_is_named_and_nothing_is_begun_over_it(lost, tmp_path, capsys):
    whole, newer = write(tmp_path, 1), write(tmp_path, 2)
    (newer / STATE_FILE).unlink()
    (newer / lost).unlink(missing_ok=True)
    assert find_checkpoint(config(tmp_path)) == whole
    assert f"{newer} is not whole" in capsys.readouterr().err
    (whole / STATE_FILE).unlink()
    with pytest.raises(ConfigError, match="no checkpoint of the run is whole"):
        find_checkpoint(config(tmp_path))


def test_a_checkpoint_whose_removal_a_kill_cut_short_is_removed_with_the_next(tmp_path):
    (write(tmp_path, 1) / STATE_FILE).unlink()
    write(tmp_path, 2, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_2"]


def test_a_checkpoint_that_cannot_be_read_is_not_whole(tmp_path):
    path = write(tmp_path, 1)
    (path / FILES_FILE).unlink()
    (path / FILES_FILE).mkdir()
    assert "cannot be read" in torn(path)


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


def test_a_checkpoint_that_was_moved_to_another_disk_is_replaced_and_dropped_like_any_other(tmp_path):
    for step in (3, 4):
        path = write(tmp_path, step)
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    assert not write(tmp_path, 4, keep=1).is_symlink()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_4"]


def test_a_disk_without_room_for_another_checkpoint_is_found_before_one_is_written(tmp_path, monkeypatch):
    check_room(tmp_path)
    write(tmp_path, 1)
    check_room(tmp_path)
    disks = {tmp_path / "checkpoints": 3, tmp_path: 1 << 40}  # the checkpoints may be on another one
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=disks[path]))
    with pytest.raises(OSError, match="a checkpoint takes"):
        check_room(tmp_path)


async def test_an_interrupt_while_a_checkpoint_gets_its_name_writes_its_own_behind_it(tmp_path, monkeypatch):
    """Both are of the same step, so they are written in the same place."""
    events: list[str] = []
    naming, go_on = threading.Event(), threading.Event()

    class SavingLearner(Learner):
        async def save(self, folder: str) -> None:
            events.append("saved")
            await asyncio.to_thread(Path(folder).mkdir, parents=True)

    def slowly(temporary: Path, final: Path) -> None:
        naming.set()
        go_on.wait(120.0)
        move_into_place(temporary, final)
        events.append("named")

    monkeypatch.setattr("trainer.state.move_into_place", slowly)
    running = parts(learner=SavingLearner(1))
    running.config.run_dir = str(tmp_path)
    running.watch.state_dict = lambda: TOTALS
    first = asyncio.create_task(save_checkpoint(running, {}))
    assert await asyncio.to_thread(naming.wait, 120.0)
    first.cancel()
    await asyncio.wait({first})
    second = asyncio.create_task(save_checkpoint(running, {}))
    await asyncio.wait({second}, timeout=0.3)  # long enough to save beside the first one, if it did
    go_on.set()
    path = await second
    assert events == ["saved", "named", "saved", "named"]
    assert torn(path) is None


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
    newest = write(tmp_path, 2)
    with pytest.raises(ConfigError, match=f"no checkpoint.*the newest in it is {newest}"):
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
    ("written", "stage", "dtype", "refused"),
    [
        (2, 3, "float32", True),
        (3, 2, "float32", True),
        (0, 2, "float32", True),
        (3, 0, "float32", True),
        (2, 0, "float32", True),
        (0, 0, "bfloat16", True),
        (0, 0, "float32", False),
        (2, 1, "float32", False),
        (2, 0, "bfloat16", False),
        (3, 3, "bfloat16", False),
    ],
)
def test_a_learner_of_another_zero_stage_is_refused_before_anything_is_started(
    tmp_path, written, stage, dtype, refused
):
    """In bfloat16, stage 0 becomes 1."""
    folder = write(tmp_path, 1)
    (folder / "learner" / "learner").mkdir(parents=True)
    for name in FILES[written]:
        (folder / "learner" / "learner" / name).touch()
    run = replace(config(), learner=LearnerConfig(zero_stage=stage))
    with pytest.raises(ConfigError, match=r"learner\.zero_stage.*the stage must stay") if refused else nullcontext():
        load_state(folder, run, stream(), dtype=dtype)


async def test_a_learner_that_cannot_be_loaded_is_named_with_its_checkpoint_and_what_to_do(tmp_path):
    class DamagedLearner:
        async def load(self, folder: str) -> None:
            raise LearnerError("learner load failed on rank 0: UnpicklingError: invalid load key")

    with pytest.raises(LearnerError, match=r"step_4 cannot be loaded.*invalid load key.*another with `resume=PATH`"):
        await load_learner(parts(learner=DamagedLearner()), checkpoint_path(tmp_path, 4))
