import json
from pathlib import Path

import pytest

from generator.task import DataError, ModelError, TaskContext
from recipes.ci_tiny.model import build
from tests.tiny import tiny_llama
from tests.trainer.configs import tiny_config
from trainer.checks import ConfigError
from trainer.config import Config, LearnerConfig, LoRAConfig
from trainer.dotted import DottedPathError
from trainer.inputs import check_adapter_targets, check_learnable, check_stops, find_model, find_reference, make_task
from trainer.model import ResolvedModel
from trainer.task_calls import load_data


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("os.path", "cannot be made: TypeError"),
        ("os.getcwd", "makes a str, which has no method `load`"),
        ("trainer.config.Config", "which has no method `load`"),
    ],
)
def test_what_is_no_task_is_refused_before_anything_is_loaded(task, words):
    with pytest.raises(DottedPathError, match=words):
        make_task(Config(task=task))


class ReadsAFile:
    """As a newcomer writes it: nothing is caught."""

    def load(self, context):
        Path(context.eval_path or context.data_path).read_text()


def test_a_file_of_the_configuration_that_a_task_does_not_find_is_named_by_its_key(tmp_path):
    here = tmp_path / "rows.csv"
    here.touch()
    with pytest.raises(DataError, match=r"data\.path: there is no file tickts\.csv \(looked in /"):
        load_data(ReadsAFile(), TaskContext("tickts.csv", {}, lambda: False, 0))
    with pytest.raises(DataError, match=r"data\.eval_path: there is no file nothing\.csv"):
        load_data(ReadsAFile(), TaskContext(str(here), {}, lambda: False, 0, eval_path="nothing.csv"))


def test_a_target_of_adapters_that_is_no_layer_of_the_model_is_refused_with_the_nearest_one(tmp_path):
    tiny_llama(1).config.save_pretrained(tmp_path)  # no weights are needed
    model = ResolvedModel(str(tmp_path), "a model", "", (2,), 512, "float32")
    config = Config(task="x", learner=LearnerConfig(lora=LoRAConfig(rank=4, targets=["q_proj", "up_proj"])))
    check_adapter_targets(config, model)
    config.learner.lora.targets = ["q_prj"]
    with pytest.raises(ConfigError, match=r"names 'q_prj', which is no linear layer .* did you mean `q_proj`"):
        check_adapter_targets(config, model)


@pytest.fixture
def folder(tmp_path):
    build(tmp_path)
    return tmp_path


def found(folder, **settings) -> ResolvedModel:
    """The model in ``folder`` with settings added to its configuration."""
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | settings))
    return find_model(tiny_config(), str(folder))


def test_a_stop_that_no_response_can_hold_is_refused_before_an_engine_is_there(folder):
    model = found(folder)
    check_stops(tiny_config({"sampling.stop": ["ab"], "sampling.stop_token_ids": [63]}), model)
    with pytest.raises(ConfigError, match=r"`sampling\.stop`: .*special token '<eos>'.*stop_token_ids=\[2\]"):
        check_stops(tiny_config({"sampling.stop": ["a<eos>"]}), model)
    with pytest.raises(ConfigError, match=r"`sampling\.stop_token_ids` has 64, .* end at 63"):
        check_stops(tiny_config({"sampling.stop_token_ids": [64]}), model)


def test_a_model_that_caps_its_logits_is_refused_by_the_setting_unless_nothing_is_trained(folder):
    model = found(folder, final_logit_softcapping=30.0)
    with pytest.raises(ModelError, match=r"final_logit_softcapping=30\.0"):
        check_learnable(tiny_config(), model)
    check_learnable(tiny_config({"learner.ranks": 0}), model)
    check_learnable(tiny_config(), found(folder, final_logit_softcapping=None, logit_scale=1.0))


def test_a_reference_of_another_vocabulary_or_of_no_place_is_refused_by_its_key(folder):
    model = found(folder)
    changes = {"algorithm.kl.model": str(folder), "algorithm.kl.coefficient": 0.1}
    assert find_reference(tiny_config(changes), model) == model
    assert find_reference(tiny_config(changes | {"algorithm.kl.coefficient": 0.0}), model) is None
    with pytest.raises(ModelError, match=r"algorithm\.kl\.model=.* knows 65 tokens .* 64"):
        find_reference(tiny_config(changes), found(folder, vocab_size=65) and model)
    with pytest.raises(ModelError, match=r"algorithm\.kl\.model.*/nowhere"):
        find_reference(tiny_config(changes | {"algorithm.kl.model": "/nowhere"}), model)
