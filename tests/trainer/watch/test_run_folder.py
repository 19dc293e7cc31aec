"""The files of a run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import numpy as np
import pytest
from omegaconf import OmegaConf

from trainer.config import Config
from trainer.watch import run_folder
from trainer.watch.run_folder import RunFolder, RunFolderError, write_atomically


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_config_holds_every_value_and_package_versions(tmp_path):
    settings = asdict(Config(name="toy", task="recipes.toy", steps=3, run_dir="outputs/toy"))
    RunFolder(tmp_path).write_config(settings)
    written = OmegaConf.load(tmp_path / "config.yaml")
    assert {key: value for key, value in OmegaConf.to_container(written).items() if key != "versions"} == settings
    assert written.versions.torch.startswith("2.")


def test_metrics_are_readable_while_the_run_goes_on(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append_metrics(1, {"reward/mean": 0.5})
    folder.append_metrics(2, {"reward/mean": np.float32(0.25)})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.25}]


def test_numbers_that_json_cannot_say_become_null(tmp_path):
    RunFolder(tmp_path).append_metrics(1, {"a/nan": float("nan"), "a/inf": float("-inf"), "a/numpy": np.float64("nan")})
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "a/nan": None, "a/inf": None, "a/numpy": None}]


def test_rollout_files_have_the_keys_of_the_contract_and_align_with_advantages(tmp_path, scored, group):
    groups = [group(scored(1.0, ((0, 2), (1, 1)), exact=1.0), scored(None, text="fünf\n\u2028")), group(scored(0.0))]
    path = RunFolder(tmp_path).write_rollouts(4, groups, [[0.5, 0.0], [-0.5]])
    rows = lines_of(path)
    assert path.name == "step_4.jsonl"
    assert {"step", "prompt_token_ids", "response_token_ids", "logprobs", "versions", "loss_mask", "reward",
            "advantage", "finish_reason", "text"} <= rows[0].keys()  # fmt: skip
    assert rows[0]["versions"] == [0, 0, 1]
    assert rows[0]["loss_mask"] == [True, True, True]
    assert [row["advantage"] for row in rows] == [0.5, 0.0, -0.5]
    assert rows[1]["reward"] is None
    assert rows[1]["text"] == "fünf\n\u2028"


def lines_of(path):
    # Not splitlines(): a completion may hold U+2028, which is no line break of JSON lines.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_a_batch_with_a_skipped_update_has_a_file_of_its_own_with_the_reason_in_every_line(tmp_path, scored, group):
    folder = RunFolder(tmp_path)
    path = folder.write_rollouts(4, [group(scored(1.0), scored(0.0))], [[0.5, -0.5]], skipped="the loss is nan")
    assert path.name == "skipped_step_4.jsonl"
    assert [row["skipped"] for row in lines_of(path)] == ["the loss is nan"] * 2
    assert "skipped" not in lines_of(folder.write_rollouts(4, [group(scored(1.0))], [[0.0]]))[0]


def test_advantages_of_another_shape_are_refused(tmp_path, scored, group):
    with pytest.raises(ValueError, match="zip"):
        RunFolder(tmp_path).write_rollouts(1, [group(scored(1.0), scored(0.0))], [[0.5]])


@pytest.mark.parametrize("result", ["metrics.jsonl", "rollouts/step_1.jsonl", "checkpoints/step_1/state.json"])
def test_a_fresh_run_refuses_the_folder_of_another_run(tmp_path, result):
    (tmp_path / result).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / result).write_text("{}\n")
    with pytest.raises(RunFolderError, match=result.partition("/")[0]) as error:
        RunFolder(tmp_path)
    assert "run_dir" in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == [result.partition("/")[0]]


def test_a_run_that_made_no_step_can_be_started_again_in_its_folder(tmp_path):
    first = RunFolder(tmp_path)
    first.write_config({"seed": 1})
    first.write_summary({"status": "failed"})
    (tmp_path / "error.txt").write_text("no such device")
    (tmp_path / "report.html").write_text("an older page")
    first.close()
    RunFolder(tmp_path)
    assert not (tmp_path / "summary.json").exists()
    assert not (tmp_path / "error.txt").exists()
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("resume_step", [None, 0])
def test_two_runs_never_write_into_one_folder(tmp_path, resume_step):
    first = RunFolder(tmp_path)
    with pytest.raises(RunFolderError, match="another run is writing"):
        RunFolder(tmp_path, resume_step)
    first.close()
    RunFolder(tmp_path, resume_step)


def test_files_that_are_not_a_runs_do_not_matter(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "nohup.out").touch()
    RunFolder(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="file"):
        RunFolder(tmp_path / "file" / "run")


def test_a_resumed_run_does_its_lost_steps_again_once(tmp_path, scored, group):
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        folder.append_metrics(step, {})
        folder.write_rollouts(step, [group(scored(1.0))], [[0.0]])
    folder.write_rollouts(3, [group(scored(1.0))], [[0.0]], skipped="the loss is nan")
    folder.write_summary({"status": "interrupted"})
    folder.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rewa')
    folder = RunFolder(tmp_path, resume_step=2)
    folder.append_metrics(3, {})
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == ["step_1.jsonl", "step_2.jsonl"]
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize(
    "tail",
    [
        '{"step": 3, "by_source/\u00e9'.encode()[:-1],
        b'{"step": 2\x00\x00\x00\n\x00',
        b'{"step": null}\n',
        b'{"step": "1"}\n[1]',
    ],
    ids=["half a character", "zeros", "no step", "a step that is no number"],
)
def test_whatever_a_crash_left_at_the_end_of_the_metrics_is_dropped(tail, tmp_path):
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.append_metrics(step, {"by_source/a\u2028b/reward_mean": 1.0})  # no end of a line, but for `splitlines`
    folder.close()
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + tail)
    folder = RunFolder(tmp_path, resume_step=2)
    folder.rewind()
    folder.close()
    assert path.read_bytes() == before


def test_a_run_that_continues_and_ends_before_its_first_step_has_removed_nothing(tmp_path):
    """The checkpoints of the later steps may still be there, and another start goes on from them."""
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        folder.append_metrics(step, {})
        folder.append_evaluation(step, {"eval/reward_mean": 1.0})
    folder.close()
    folder = RunFolder(tmp_path, resume_step=1)
    assert list(folder.evaluations) == [1]
    folder.close()
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert [row["step"] for row in lines(tmp_path / name)] == [1, 2, 3]


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_atomically(path, "old")

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_folder.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_are_readable_by_colleagues_as_the_umask_says(tmp_path):
    RunFolder(tmp_path).write_summary({"status": "done"})
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "summary.json").stat().st_mode & 0o777 == 0o666 & ~mask
