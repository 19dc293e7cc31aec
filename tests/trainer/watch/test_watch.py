"""The whole watch over a small run."""

from __future__ import annotations

import io
import json
import time

import pytest

from trainer.config import Config
from trainer.watch import PushRecord, RunFolderError, Watch, catalogue


@pytest.fixture
def config(tmp_path):
    config = Config(name="toy", task="recipes.toy", steps=4, run_dir=str(tmp_path / "run"))
    config.logger.wandb.mode = "disabled"
    config.logger.rollouts.every = config.logger.table.every = 2
    return config


def run_steps(watch, steps, scored, group):
    for step in steps:
        groups = [group(scored(1.0, ((step - 1, 3),)), scored(0.0, ((step - 1, 5),), "length"))]
        for item in groups:
            watch.finished(item)
        watch.push(PushRecord(step, time.time(), 0.2, 0.1, phases=(("transfer", time.time(), 0.05),)))
        watch.step(step, {"policy/loss": 0.5}, groups, [[1.0, -1.0]], version=step - 1)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_every_file_of_the_contract(tmp_path, config, scored, group):
    stream = io.StringIO()
    watch = Watch(config, stream=stream)
    watch.begin()
    watch.evaluation(0, {"eval/reward_mean": 0.25, "eval/pass@1": 0.2})
    run_steps(watch, (1, 2), scored, group)
    watch.close("done")
    folder = tmp_path / "run"
    assert {p.name for p in folder.iterdir()} == {
        "config.yaml",
        "evaluations.jsonl",
        "metrics.jsonl",
        "report.html",
        "rollouts",
        "summary.json",
        "trace.json",
    }
    assert [p.name for p in (folder / "rollouts").iterdir()] == ["step_2.jsonl"]
    assert [row["step"] for row in metrics(folder)] == [1, 2]
    assert metrics(folder)[1]["push/version"] == 2
    summary = json.loads((folder / "summary.json").read_text())
    described = {metric.name for metric in catalogue.SUMMARY} - {"error"}
    assert described < summary.keys()
    assert catalogue.unknown(summary.keys() - described) == []
    assert (summary["status"], summary["steps"], summary["policy_version"]) == ("done", 2, 2)
    assert summary["tokens/generated"] == summary["tokens/trained"] == 16
    assert "some completions" in stream.getvalue()
    assert "wandb       disabled" in stream.getvalue()
    names = {event["name"] for event in json.loads((folder / "trace.json").read_text())["traceEvents"]}
    assert {"push version 2", "transfer"} <= names


def test_throughput_of_a_step_counts_only_what_finished_since_the_step_before(config, scored, group):
    watch = Watch(config, stream=io.StringIO())
    watch.finished(group(scored(1.0, ((0, 5),))))
    first = watch.step(1, {}, [], [], version=0)
    second = watch.step(2, {}, [], [], version=1)
    assert first["throughput/generated_tokens_per_second"] > 0
    assert second["throughput/generated_tokens_per_second"] == 0
    watch.close("done")


def test_a_skipped_update_is_counted_and_said_and_its_batch_is_kept(tmp_path, config, scored, group, caplog):
    watch = Watch(config, stream=io.StringIO())
    watch.skipped(3, "the loss is nan", [group(scored(1.0))], [[0.5]])
    summary = watch.close("done")
    assert summary["steps/skipped"] == 1
    assert (tmp_path / "run" / "rollouts" / "skipped_step_3.jsonl").is_file()
    assert "step 3: an update was skipped: the loss is nan" in caplog.text


def test_evaluations_are_shown_summed_up_and_known_to_a_run_that_continues(tmp_path, config, scored, group):
    stream = io.StringIO()
    watch = Watch(config, stream=stream)
    run_steps(watch, (1, 2, 3), scored, group)
    for version, reward in ((0, 0.1), (2, 0.7), (3, 0.4)):
        watch.evaluation(version, {"eval/reward_mean": reward, "eval/pass@1": reward, "eval/prompts": 8.0})
    summary = watch.close("interrupted")
    assert (summary["eval/last_reward_mean"], summary["eval/best_reward_mean"]) == (0.4, 0.7)
    assert summary["eval/best_version"] == 2
    assert "evaluation of version 2  reward 0.700" in stream.getvalue()
    assert "pass@1 0.700  8 prompts" in stream.getvalue()
    again = Watch(config, resume_step=2, stream=io.StringIO())
    assert [again.evaluated(version) for version in (0, 1, 2, 3)] == [True, False, True, False]
    assert again.close("interrupted")["eval/last_reward_mean"] == 0.7


def test_a_failed_run_names_its_error_in_the_summary_and_on_the_screen(tmp_path, config):
    stream = io.StringIO()
    watch = Watch(config, stream=stream)
    watch.close("failed", RuntimeError("engine 0 died"))
    watch.close("done")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", "RuntimeError: engine 0 died")
    assert "engine 0 died" in stream.getvalue()


def test_a_second_run_does_not_touch_the_folder_of_the_first(tmp_path, config, scored, group):
    first = Watch(config, stream=io.StringIO())
    first.step(1, {}, [group(scored(1.0), scored(0.0))], [[1.0, -1.0]], version=0)
    first.close("done")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "run").iterdir()}
    with pytest.raises(RunFolderError):
        Watch(config, stream=io.StringIO())
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "run").iterdir()} == before


def test_a_resumed_run_continues_its_totals_and_its_lines(tmp_path, config, scored, group):
    watch = Watch(config, stream=io.StringIO())
    run_steps(watch, (1, 2), scored, group)
    state = json.loads(json.dumps(watch.state_dict()))
    run_steps(watch, (3,), scored, group)
    watch.close("interrupted")
    stream = io.StringIO()
    watch = Watch(config, resume_step=2, stream=stream)
    watch.load_state_dict(state)
    run_steps(watch, (3, 4), scored, group)
    summary = watch.close("done")
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert (summary["tokens/trained"], summary["push/count"], summary["steps"]) == (32, 4, 4)
    assert summary["wall_seconds"] >= state["wall_seconds"]
    assert "continued after step 2" in stream.getvalue()


def test_a_run_that_cannot_learn_because_every_response_is_cut_says_so_once(config, scored, group, caplog):
    watch = Watch(config, stream=io.StringIO())
    watch.begin()
    learning = [group(scored(1.0, ((0, 3),), "length"), scored(0.0, ((0, 5),), "length"))]
    watch.step(1, {}, learning, [[1.0, -1.0]], version=0)
    solved = [group(scored(1.0, ((0, 3),), "length"), scored(1.0, ((0, 5),), "length"))]
    watch.step(2, {}, solved, [[0.0, 0.0]], version=1)
    assert "nothing was learned" not in caplog.text
    hopeless = [group(scored(0.0, ((0, 3),), "length"), scored(0.0, ((0, 5),), "length"))]
    for step in (3, 4):
        watch.step(step, {}, hopeless, [[0.0, 0.0]], version=step - 1)
    assert caplog.text.count("nothing was learned") == 1
    assert "sampling.max_tokens=256" in caplog.text
    watch.close("done")


def test_a_report_is_written_at_the_end_and_only_where_it_is_wanted(tmp_path, config, scored, group):
    config.logger.report = False
    watch = Watch(config, stream=io.StringIO())
    run_steps(watch, (1,), scored, group)
    watch.close("done")
    assert not (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("status", ["done", "failed", "interrupted"])
def test_a_report_that_fails_is_a_warning_and_the_run_ends_as_it_would(tmp_path, config, scored, group, caplog, status):
    watch = Watch(config, stream=io.StringIO())
    run_steps(watch, (1,), scored, group)
    (tmp_path / "run" / "report.html").mkdir()  # nothing can be written in its place
    assert watch.close(status)["status"] == status
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == status
    assert "no report was written" in caplog.text


def test_where_the_model_was_read_stands_beside_the_settings(tmp_path, config):
    Watch(config, model_folder="/models/mine", stream=io.StringIO()).close("done")
    assert "model_folder: /models/mine\n" in (tmp_path / "run" / "config.yaml").read_text()
