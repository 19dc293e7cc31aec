import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from generator.task import DataError, TaskContext
from recipes.ci_tiny import CiTiny
from recipes.ci_tiny.model import CHARACTERS, EOS, PAD, build
from recipes.ci_tiny.reward import share_of_a


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ci_tiny")
    build(path)
    return path


def context(path=None, seed=0) -> TaskContext:
    return TaskContext(path, {}, lambda: False, seed)


def test_the_reward_is_the_share_of_the_letter_a():
    assert share_of_a(["p"] * 4, ["aaaa", "ab", "xyz", ""]) == [1.0, 0.5, 0.0, 0.0]


def test_prompts_are_dozens_of_distinct_short_strings_of_the_model_s_characters():
    data = CiTiny().load(context())
    texts = [CiTiny().prompt(row) for row in [*data.rows, *data.eval_rows]]
    assert len(set(texts)) == len(texts) >= 40
    assert set("".join(texts)) <= set(CHARACTERS)
    assert data.eval_rows


def test_prompts_depend_on_the_seed_alone():
    assert CiTiny().load(context(seed=1)) == CiTiny().load(context(seed=1))
    assert CiTiny().load(context(seed=1)) != CiTiny().load(context(seed=2))


def test_a_data_file_is_refused_instead_of_ignored():
    with pytest.raises(DataError, match=r"data\.path is 'rows\.jsonl'"):
        CiTiny().load(context("rows.jsonl"))
    with pytest.raises(DataError, match=r"data\.eval_path is 'rows\.jsonl'"):
        CiTiny().load(replace(context(), eval_path="rows.jsonl"))


def test_every_character_is_one_token_and_decodes_to_itself(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(CHARACTERS).ids
    assert len(set(ids)) == len(CHARACTERS)
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer.encode("\N{SNOWMAN}").ids == tokenizer.encode(" ").ids


def test_padding_and_end_of_sequence_are_different_tokens_and_decode_to_nothing(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    assert config["pad_token_id"] == tokenizer.token_to_id(PAD) != tokenizer.token_to_id(EOS) == config["eos_token_id"]
    assert tokenizer.decode([config["pad_token_id"], config["eos_token_id"]]) == ""


def test_the_model_is_the_same_each_time_and_its_head_is_tied(folder, tmp_path):
    build(tmp_path)
    first, second = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert "lm_head.weight" not in first
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.engine
def test_transformers_loads_the_folder_with_every_weight_and_a_distribution_that_is_not_flat(folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    logits = model(**tokenizer("abc", return_tensors="pt")).logits[0, -1]
    assert torch.softmax(logits, -1).max() > 2 / logits.shape[-1]
