"""What the evaluation command is pointed at, and with which configuration."""

import json
from dataclasses import asdict

import pytest

from tests.trainer.configs import tiny_config
from trainer.checkpoint_folder import FILES_FILE, STATE_FILE
from trainer.checks import ConfigError
from trainer.evaluate import append_result, evaluating, model_folder, result, table
from trainer.evaluation_target import find_target, run_config
from trainer.model import ResolvedModel
from trainer.placement import engine_settings
from trainer.watch.run_folder import RunFolder


@pytest.fixture
def run_dir(tmp_path):
    """A run folder with two checkpoints and an export."""
    folder = RunFolder(tmp_path / "run")
    settings = asdict(tiny_config({"run_dir": str(tmp_path / "run"), "evaluation.every": 5, "seed": 3}))
    folder.write_config(settings, model_folder="/models/mine")
    folder.close()
    for step in (5, 10):
        checkpoint = folder.path / "checkpoints" / f"step_{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / STATE_FILE).write_text("{}")
        (checkpoint / FILES_FILE).write_text(json.dumps({STATE_FILE: 2}))
    (folder.path / "export").mkdir()
    (folder.path / "export" / "config.json").write_text("{}")
    return folder.path


def test_of_a_run_folder_it_is_the_newest_whole_checkpoint_under_the_runs_own_configuration(run_dir):
    target = find_target(str(run_dir), [])
    assert (target.checkpoint, target.version, target.run_dir) == (run_dir / "checkpoints" / "step_10", 10, run_dir)
    assert (target.config.name, target.config.seed) == ("ci_tiny", 3)
    (run_dir / "checkpoints" / "step_10" / STATE_FILE).write_text("{ }")
    assert find_target(str(run_dir), []).version == 5


def test_a_checkpoint_is_taken_by_its_path_and_one_that_is_not_whole_is_refused(run_dir):
    path = run_dir / "checkpoints" / "step_5"
    assert find_target(str(path), []).version == 5
    (path / FILES_FILE).write_text("[")
    with pytest.raises(ConfigError, match="not whole"):
        find_target(str(path), [])
    (path / STATE_FILE).unlink()
    (path / FILES_FILE).unlink()
    with pytest.raises(ConfigError, match=f"not whole: {STATE_FILE} is missing"):
        find_target(str(path), [])


def test_the_export_of_a_run_is_a_model_under_the_runs_configuration(run_dir):
    target = find_target(str(run_dir / "export"), ["evaluation.rollouts=4"])
    assert target.checkpoint is None
    assert target.config.model.path == str(run_dir / "export")
    assert (target.config.seed, target.config.evaluation.rollouts) == (3, 4)


def test_any_other_model_needs_a_recipe(tmp_path):
    with pytest.raises(ConfigError, match="recipe=NAME"):
        find_target("owner/model", [])
    target = find_target("owner/model", ["recipe=ci_tiny", "hardware=cpu"])
    assert (target.config.model.path, target.version, target.run_dir) == ("owner/model", 0, None)


def test_keys_of_a_run_can_be_changed_with_hydras_grammar(run_dir):
    config = run_config(
        run_dir, ["evaluation.temperature=0", "data.options.steps=2", "sampling.stop=[a,'b c']", "data.eval_path=null"]
    )
    assert config.evaluation.temperature == 0
    assert config.data.options == {"steps": 2}
    assert config.sampling.stop == ["a", "b c"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("recipe=gsm8k_fully_async", "its own recipe"),
        ("evaluation.rolouts=4", "evaluation.rollouts"),
        ("evaluation.rollouts=1,2", "one value"),
        ("hardware=tpu", "cpu"),
        ("evaluation.rollouts=many", "evaluation.rollouts"),
        ("seed=[", "cannot be read as an override"),
    ],
)
def test_an_override_that_cannot_be_is_named(run_dir, override, words):
    with pytest.raises(ConfigError, match=words):
        find_target(str(run_dir), [override])


def test_a_configuration_that_is_no_text_is_named(run_dir):
    (run_dir / "config.yaml").write_bytes(b"\xff\x00")
    with pytest.raises(ConfigError, match=r"config.yaml cannot be read: .*not UTF-8"):
        find_target(str(run_dir), [])


@pytest.mark.parametrize("error", [RuntimeError("failed reading zip archive"), KeyError("module"), EOFError()])
def test_damaged_weights_are_named_with_their_checkpoint(error, run_dir, monkeypatch):
    """What torch raises depends on the byte that is wrong."""

    def read(*_: object) -> None:
        raise error

    monkeypatch.setattr("trainer.inputs.find_model", lambda *_: None)
    monkeypatch.setattr("trainer.checkpoint_model.write_checkpoint_model", read)
    with (
        pytest.raises(ConfigError, match=r"step_10 cannot be read.*damaged"),
        model_folder(find_target(str(run_dir), [])),
    ):
        pass


def test_a_run_of_one_hardware_is_evaluated_on_another(run_dir):
    config = run_config(run_dir, ["hardware=gpu"])
    assert config.hardware == "gpu"


def test_a_run_without_checkpoints_has_nothing_to_evaluate(run_dir):
    for step in (5, 10):
        (run_dir / "checkpoints" / f"step_{step}" / STATE_FILE).unlink()
    with pytest.raises(ConfigError, match="no whole checkpoint"):
        find_target(str(run_dir), [])


def test_nothing_of_an_evaluation_asks_for_a_learner_or_a_reference(run_dir):
    (run_dir / "config.yaml").write_text(
        (run_dir / "config.yaml").read_text().replace("  coefficient: 0.0", "  coefficient: 0.1")
    )
    config = evaluating(find_target(str(run_dir), ["evaluation.every=0", "algorithm.kl.model=/nowhere"])).config
    assert (config.learner.ranks, config.algorithm.kl.model, config.evaluation.every) == (0, None, 1)


def test_the_engines_of_an_evaluation_load_whole_weights_where_those_of_the_run_took_an_adapter(run_dir):
    adapted = ["learner.lora.rank=4", "learner.lora.targets=[q_proj]", "weight_sync.lora=adapter"]
    model = ResolvedModel("/model", "a model", "", (2,), 512, "float32")
    target = find_target(str(run_dir), adapted)
    assert engine_settings(target.config, model, 5).lora_rank == 4
    assert engine_settings(evaluating(target).config, model, 5).lora_rank == 0


def test_the_result_says_of_which_weights_it_is_and_how_it_was_measured(run_dir, tmp_path):
    target = find_target(str(run_dir), [])
    metrics = {
        "eval/prompts": 4.0,
        "eval/reward_mean": 0.5,
        "eval/reward_std": 0.25,
        "eval/pass@1": 0.25,
        "eval/by_source/easy/reward_mean": 0.75,
        "eval/length_mean": 12.5,
        "eval/truncated_fraction": 0.125,
        "eval/excluded": float("nan"),
        "eval/seconds": 1.5,
    }
    append_result(tmp_path / "out" / "result.jsonl", result(target, "some data", metrics))
    row = json.loads((tmp_path / "out" / "result.jsonl").read_text())
    assert (row["step"], row["recipe"], row["data"], row["eval/pass@1"]) == (10, "ci_tiny", "some data", 0.25)
    assert row["evaluation"]["rollouts"] == 1
    assert row["eval/excluded"] is None
    shown = table(metrics, 1)
    assert "0.5000 ±0.25" in shown
    assert "12.5 %" in shown
    assert "of easy        0.7500" in shown


def test_a_result_behind_one_that_a_kill_cut_in_two_has_a_line_of_its_own(tmp_path):
    path = tmp_path / "evaluated.jsonl"
    for row in ({"step": 1}, {"step": 2}):
        append_result(path, row)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    path.write_bytes(path.read_bytes()[:-4])
    append_result(path, {"step": 3})
    assert path.read_text().splitlines() == ['{"step": 1}', '{"step":', '{"step": 3}']
