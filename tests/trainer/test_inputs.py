import pytest

from tests.tiny import tiny_llama
from trainer.checks import ConfigError
from trainer.config import Config, LearnerConfig, LoRAConfig
from trainer.dotted import DottedPathError
from trainer.inputs import check_adapter_targets, make_task
from trainer.model import ResolvedModel


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


def test_a_target_of_adapters_that_is_no_layer_of_the_model_is_refused_with_the_nearest_one(tmp_path):
    tiny_llama(1).config.save_pretrained(tmp_path)  # no weights are needed
    model = ResolvedModel(str(tmp_path), "a model", "", (2,), 512, "float32")
    config = Config(task="x", learner=LearnerConfig(lora=LoRAConfig(rank=4, targets=["q_proj", "up_proj"])))
    check_adapter_targets(config, model)
    config.learner.lora.targets = ["q_prj"]
    with pytest.raises(ConfigError, match=r"names 'q_prj', which is no linear layer .* did you mean `q_proj`"):
        check_adapter_targets(config, model)
