"""A learner's checkpoint becomes a model folder. Of ZeRO stage 3: in test_learner.py, with DeepSpeed."""

import pytest
import torch

from tests.tiny import next_token_logprobs, tiny_llama
from trainer.adapter_record import AdapterRecord
from trainer.checkpoint_model import write_checkpoint_model
from trainer.config import LoRAConfig
from trainer.lora import add_adapters, fingerprint
from trainer.model import ResolvedModel
from trainer.zero_files import CHECKPOINT_TAG
from weight_sync.lora import adapted_layers

TOKENS = [1, 5, 9, 2, 7]


@pytest.fixture
def base(tmp_path) -> ResolvedModel:
    """Where a run started from: other weights, and a configuration of generation."""
    model = tiny_llama(seed=0)
    model.generation_config.eos_token_id = [2, 3]
    model.save_pretrained(tmp_path / "base")
    return ResolvedModel(str(tmp_path / "base"), "the base", "", (2,), 512, "float32")


def checkpoint(folder, state: dict[str, torch.Tensor]):
    """What DeepSpeed writes at stage 0, as far as it is read."""
    (folder / "learner" / CHECKPOINT_TAG).mkdir(parents=True)
    module = {f"model.{name}": tensor for name, tensor in state.items()}
    torch.save(
        {"module": module, "optimizer": None}, folder / "learner" / CHECKPOINT_TAG / "mp_rank_00_model_states.pt"
    )
    return folder / "learner"


@pytest.mark.parametrize(("dtype", "error"), [("float32", 0.0), ("bfloat16", 0.2)])
def test_the_folder_is_a_model_with_the_weights_of_the_checkpoint(base, tmp_path, dtype, error):
    from transformers import AutoModelForCausalLM

    trained = tiny_llama(seed=1)
    base = ResolvedModel(base.path, base.source, base.reason, base.eos_token_ids, 512, dtype)
    write_checkpoint_model(checkpoint(tmp_path, trained.state_dict()), base, False, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert str(loaded.dtype) == f"torch.{dtype}"
    assert loaded.generation_config.eos_token_id == [2, 3]
    wanted = next_token_logprobs(trained, TOKENS)
    torch.testing.assert_close(next_token_logprobs(loaded.float(), TOKENS), wanted, atol=max(error, 1e-6), rtol=0)


def test_a_checkpoint_of_another_architecture_is_refused_with_the_weight_that_does_not_fit(base, tmp_path):
    state = tiny_llama(seed=1).state_dict()
    norm = state.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"no weight model\.norm\.weight"):
        write_checkpoint_model(checkpoint(tmp_path / "a", state), base, False, tmp_path / "out")
    state["model.norm.weight"] = norm[:-1]
    with pytest.raises(ValueError, match=r"model\.norm\.weight is \[127\] in the checkpoint"):
        write_checkpoint_model(checkpoint(tmp_path / "b", state), base, False, tmp_path / "out")


def test_a_folder_without_a_learner_is_named(base, tmp_path):
    with pytest.raises(FileNotFoundError, match="no learner checkpoint"):
        write_checkpoint_model(tmp_path, base, False, tmp_path / "out")


LORA = LoRAConfig(rank=2, alpha=6.0, targets=["q_proj", "down_proj"])


def trained_adapters():
    """The model of ``base`` with adapters that change what it computes."""
    model = tiny_llama(seed=0)
    add_adapters(model, LORA)
    torch.manual_seed(1)
    with torch.no_grad():
        for _, layer in adapted_layers(model):
            layer.lora_B["default"].weight.normal_(std=0.1)
    return model


def adapter_checkpoint(folder, trained, base_seed: int):
    state = {name: tensor for name, tensor in trained.state_dict().items() if "lora_" in name}
    AdapterRecord(LORA, fingerprint(tiny_llama(base_seed)), "float32").write(folder / "learner", parts=0)
    return checkpoint(folder, state)


def test_adapters_are_merged_into_the_weights_that_they_are_for(base, tmp_path):
    from transformers import AutoModelForCausalLM

    trained = trained_adapters()
    write_checkpoint_model(adapter_checkpoint(tmp_path, trained, base_seed=0), base, False, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    wanted = next_token_logprobs(trained, TOKENS)
    assert not torch.allclose(next_token_logprobs(tiny_llama(seed=0), TOKENS), wanted, atol=1e-2)
    torch.testing.assert_close(next_token_logprobs(loaded, TOKENS), wanted, atol=1e-3, rtol=0)


def test_adapters_to_another_model_are_refused(base, tmp_path):
    learner = adapter_checkpoint(tmp_path, trained_adapters(), base_seed=3)
    with pytest.raises(ValueError, match="holds an adapter to another model than the base"):
        write_checkpoint_model(learner, base, False, tmp_path / "out")
