"""Several data sets: what the configuration says of them, and the prompts of a run on them."""

import json

import pytest

from recipes.ci_tiny.model import build
from tests.trainer.configs import tiny_config
from trainer.checks import ConfigError, check
from trainer.config import DataConfig
from trainer.inputs import load_inputs
from trainer.mixture import DataSource, MixtureError, data_sources, interleaved

MIXTURE = [
    {"path": "/data/easy.jsonl", "weight": 3},
    {"name": "made", "options": {"steps": 2}, "eval_path": "/data/held_out.jsonl"},
]


def test_weights_become_shares_and_each_data_set_has_its_own_path_and_options():
    easy, made = data_sources(DataConfig(mixture=MIXTURE, options={"steps": 1, "prompt": "short"}))
    assert easy == DataSource("easy", 0.75, "/data/easy.jsonl", None, {"steps": 1, "prompt": "short"})
    assert made == DataSource("made", 0.25, None, "/data/held_out.jsonl", {"steps": 2, "prompt": "short"})


def test_without_a_mixture_there_is_one_data_set_without_a_name():
    (only,) = data_sources(DataConfig(path="a.jsonl", eval_path="b.jsonl", options={"x": 1}))
    assert only == DataSource("", 1.0, "a.jsonl", "b.jsonl", {"x": 1})


@pytest.mark.parametrize(
    ("mixture", "words"),
    [
        (["a.jsonl"], "data set 1: 'a.jsonl' is no mapping"),
        ([{"path": "a.jsonl", "wieght": 1}], "did you mean `weight`"),
        ([{"path": "a.jsonl", "weight": 0}], "the weight of 'a' is 0"),
        ([{"path": "a.jsonl", "weight": True}], "the weight of 'a' is True"),
        ([{"path": "a.jsonl", "weight": float("nan")}], "the weight of 'a' is nan"),
        ([{"path": "a.jsonl"}, {"path": "b/a.jsonl"}], "several data sets are named 'a'"),
        ([{"name": "a/b"}], "without a `/`"),
        ([{"path": "a.jsonl", "options": [1]}], "not a mapping"),
        ([{"path": "a.jsonl"}, {"path": 5}], "data set 2: `path` is 5"),
        ([{"path": "a.jsonl", "eval_path": ["b"]}], "data set 1: `eval_path` is"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_with_the_data_set_and_the_key(mixture, words):
    with pytest.raises(MixtureError, match=words):
        data_sources(DataConfig(mixture=mixture))
    with pytest.raises(ConfigError, match=words):
        check(tiny_config({"data.mixture": mixture}))


@pytest.mark.parametrize("key", ["path", "eval_path"])
def test_a_file_beside_a_mixture_is_refused(key):
    with pytest.raises(MixtureError, match=f"data.{key}"):
        data_sources(DataConfig(mixture=MIXTURE, **{key: "a.jsonl"}))


def test_any_beginning_of_interleaved_rows_has_something_of_all():
    assert interleaved([["a", "b", "c"], ["x"], ["1", "2"]]) == ["a", "x", "1", "b", "2", "c"]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """The inputs of a run on two sets of generated problems, of one step and of two."""
    model = tmp_path_factory.mktemp("model")
    build(model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 4096}))
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    mixture = [
        {"name": "easy", "weight": 3, "options": {"steps": 1, "train_rows": 20, "eval_rows": 6}},
        {"name": "hard", "weight": 1, "options": {"steps": 2, "train_rows": 30, "eval_rows": 6}},
    ]
    changes = {
        "task": "recipes.gsm8k.task.GSM8K",
        "data.mixture": mixture,
        "data.options": {"source": "generated"},
        "evaluation.every": 1,
        "evaluation.prompts": 5,
        "model.path": str(model),
    }
    return load_inputs(tiny_config(changes))


def test_a_run_draws_its_prompts_from_all_data_sets_by_their_shares_each_rendered_with_its_own_options(mixed):
    drawn = [mixed.prompts.next() for _ in range(40)]
    assert [prompt.source for prompt in drawn].count("easy") == 30
    assert len({prompt.id for prompt in drawn}) == 20 + 10
    assert len(mixed.prompts) == 50
    examples = {prompt.source: prompt.text.count("####") for prompt in drawn}
    assert examples == {"easy": 1, "hard": 1}
    assert all("9 - 4 = 5" in prompt.text for prompt in drawn if prompt.source == "hard")
    assert not any("9 - 4 = 5" in prompt.text for prompt in drawn if prompt.source == "easy")
    assert "75 % easy" in mixed.data.source


def test_its_held_out_prompts_are_of_all_data_sets_in_turn(mixed):
    assert sorted(prompt.source for prompt in mixed.held_out) == ["easy"] * 3 + ["hard"] * 2
    assert len({prompt.id for prompt in mixed.held_out}) == 5
