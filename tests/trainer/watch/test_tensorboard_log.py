"""TensorBoard's event files, read back by its own reader."""

from __future__ import annotations

import io

import pytest

from tests.trainer.configs import tiny_config
from trainer.checks import ConfigError, check
from trainer.config import Config
from trainer.watch import Watch
from trainer.watch.tensorboard_log import JUDGED_BY, TensorBoardLog, leaves

SETTINGS = {"seed": 7, "name": "toy", "resume": None, "optimizer": {"learning_rate": 1e-6}, "checks": ["a", "b"]}
TABLE = (("prompt", "reward"), [["2 + 2\n| is *", 1.0], ["</td><script>", None]])


def read(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator

    return EventAccumulator(str(run_dir / "tensorboard"), STORE_EVERYTHING_SIZE_GUIDANCE).Reload()


def values(found, tag):
    return [(event.step, round(event.value, 6)) for event in found.Scalars(tag)]


def shown(run_dir):
    """What TensorBoard itself shows: of what was written anew it discards texts too, as the other reader does not."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    return EventAccumulator(str(run_dir / "tensorboard"), tensor_size_guidance={"text": 0, "scalars": 0}).Reload()


def texts(run_dir, tag):
    """(step, [rows of cells]) of a text."""
    from tensorboard.util.tensor_util import make_ndarray

    arrays = [(event.step, make_ndarray(event.tensor_proto)) for event in shown(run_dir).Tensors(tag)]
    return [(step, [[cell.decode() for cell in row] for row in array]) for step, array in arrays]


def hyperparameters(found):
    from tensorboard.plugins.hparams import metadata

    by_tag = found.PluginTagToContent("hparams")
    session = metadata.parse_session_start_info_plugin_data(by_tag[metadata.SESSION_START_INFO_TAG])
    experiment = metadata.parse_experiment_plugin_data(by_tag[metadata.EXPERIMENT_TAG])
    return session, experiment, metadata.SESSION_END_INFO_TAG in by_tag


def test_metrics_and_evaluations_share_the_axis_of_steps_and_explain_themselves(tmp_path):
    log = TensorBoardLog(tmp_path, None, SETTINGS)
    log.step(0, {"eval/reward_mean": 0.1})
    log.step(1, {"reward/mean": 0.25, "policy/loss": float("nan"), "push/bytes": None})
    log.step(2, {"reward/mean": 0.5})
    log.step(2, {"eval/reward_mean": 0.7})
    log.finish("done")
    found = read(tmp_path)
    assert values(found, "reward/mean") == [(1, 0.25), (2, 0.5)]
    assert values(found, "eval/reward_mean") == [(0, 0.1), (2, 0.7)]
    assert set(found.Tags()["scalars"]) == {"reward/mean", "policy/loss", "eval/reward_mean"}
    description = found.SummaryMetadata("reward/mean").summary_description
    assert description == "mean reward of the step's rollouts that have one [reward]"


def test_completions_are_a_table_whose_text_is_shown_as_it_is(tmp_path):
    from tensorboard.plugins.text.text_plugin import text_array_to_html
    from tensorboard.util.tensor_util import make_ndarray

    log = TensorBoardLog(tmp_path, None, SETTINGS)
    log.step(5, {"reward/mean": 0.5}, TABLE)
    log.finish("done")
    found = read(tmp_path)
    ((step, rows),) = texts(tmp_path, "completions/table")
    assert step == 5
    assert rows == [["prompt", "reward"], ["    2 + 2\n    | is *", "1"], ["    </td><script>", "-"]]
    (event,) = found.Tensors("completions/table")
    html = text_array_to_html(make_ndarray(event.tensor_proto), enable_markdown=True)
    assert "2 + 2\n| is *" in html
    assert "<script>" not in html


def test_the_configuration_is_a_text_and_its_values_are_hyperparameters(tmp_path):
    TensorBoardLog(tmp_path, None, SETTINGS).finish("done")
    found = read(tmp_path)
    ((step, ((text,),)),) = texts(tmp_path, "config")
    assert step == 0
    assert "    optimizer:\n      learning_rate: 1.0e-06" in text
    session, experiment, ended = hyperparameters(found)
    assert session.hparams["optimizer.learning_rate"].number_value == 1e-6
    assert session.hparams["name"].string_value == "toy"
    assert "resume" not in session.hparams
    assert {info.name for info in experiment.hparam_infos} == set(session.hparams)
    assert [info.name.tag for info in experiment.metric_infos] == list(JUDGED_BY)
    assert ended


def test_a_run_that_continues_hides_what_was_written_after_its_checkpoint_and_repeats_nothing(tmp_path):
    first = TensorBoardLog(tmp_path, None, SETTINGS)
    first.step(0, {"eval/reward_mean": 0.0})
    for step in (1, 2, 3, 4):
        first.step(step, {"reward/mean": step / 10, "reward/gone": 1.0 * step}, TABLE)
    first.step(2, {"eval/reward_mean": 0.2})
    first.step(4, {"eval/reward_mean": 0.4})  # and then it was killed: no finish
    second = TensorBoardLog(tmp_path, 2, SETTINGS)
    second.step(3, {"reward/mean": 0.33}, TABLE)
    second.finish("interrupted")
    third = TensorBoardLog(tmp_path, 3, SETTINGS | {"seed": 8})
    third.step(4, {"reward/mean": 0.44}, TABLE)
    third.step(4, {"eval/reward_mean": 0.5})
    third.finish("done")
    found = read(tmp_path)
    assert values(found, "reward/mean") == [(1, 0.1), (2, 0.2), (3, 0.33), (4, 0.44)]
    assert values(found, "reward/gone") == [(1, 1.0), (2, 2.0)]
    assert values(found, "eval/reward_mean") == [(0, 0.0), (2, 0.2), (4, 0.5)]
    assert [event.step for event in shown(tmp_path).Tensors("reward/mean")] == [1, 2, 3, 4]
    assert [step for step, _ in texts(tmp_path, "completions/table")] == [1, 2, 3, 4]
    configs = texts(tmp_path, "config")
    assert [step for step, _ in configs] == [0, 3, 4]
    assert "seed: 8" in configs[-1][1][0][0]


def test_a_run_that_begins_again_in_its_folder_shows_nothing_of_before_but_the_evaluation_of_version_0(tmp_path):
    log = TensorBoardLog(tmp_path, None, SETTINGS)
    log.step(0, {"eval/reward_mean": 0.1})
    log.step(1, {"reward/mean": 0.1})
    TensorBoardLog(tmp_path, 0, SETTINGS).step(1, {"reward/mean": 0.2})
    found = read(tmp_path)
    assert values(found, "reward/mean") == [(1, 0.2)]
    assert values(found, "eval/reward_mean") == [(0, 0.1)]
    TensorBoardLog(tmp_path, None, SETTINGS).finish("done")
    assert values(read(tmp_path), "reward/mean") == values(read(tmp_path), "eval/reward_mean") == []


def test_a_log_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    log = TensorBoardLog(tmp_path, None, SETTINGS)
    log.step(1, {"reward/mean": 0.1})
    log.finish("done")
    assert caplog.text.count("ends here") == 1
    assert "tensorboard" in caplog.text


def test_the_watch_writes_it_only_where_it_is_asked_for(tmp_path, scored, group):
    for enabled in (True, False):
        config = Config(name="toy", task="recipes.toy", steps=2, run_dir=str(tmp_path / str(enabled)))
        config.logger.wandb.mode = "disabled"
        config.logger.tensorboard.enabled = enabled
        config.logger.table.every = 1
        stream = io.StringIO()
        watch = Watch(config, stream=stream)
        watch.step(1, {"policy/loss": 0.5}, [group(scored(1.0), scored(0.0))], [[1.0, -1.0]], version=0)
        watch.evaluation(1, {"eval/reward_mean": 0.25})
        watch.close("done")
        assert (tmp_path / str(enabled) / "tensorboard").exists() == enabled
        assert ("tensorboard --logdir" in stream.getvalue()) == enabled
    found = read(tmp_path / "True")
    assert values(found, "reward/mean") == [(1, 0.5)]
    assert values(found, "eval/reward_mean") == [(1, 0.25)]
    assert texts(tmp_path / "True", "completions/table")[0][1][0][0] == "prompt"


def test_without_the_package_it_is_a_configuration_error(monkeypatch):
    config = tiny_config({"logger.tensorboard.enabled": True})
    check(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"logger\.tensorboard\.enabled"):
        check(config)


def test_a_list_is_one_hyperparameter():
    assert dict(leaves({"a": {"b": [1, "x"], "c": True}, "d": None})) == {"a.b": "[1, 'x']", "a.c": True, "d": None}
