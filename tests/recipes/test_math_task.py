import json

import pytest

from generator.task import DataError, TaskContext
from recipes.bounded import BoundedCalls
from recipes.math import Math, reward
from recipes.math.source import HUB_ID, last_boxed

ROW = {"problem": "What is $1 + 1$?", "answer": "2"}


@pytest.fixture(autouse=True)
def _empty_hub_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def context(path=None, eval_path=None, reachable=lambda: False, **options) -> TaskContext:
    paths = [str(each) if each else None for each in (path, eval_path)]
    return TaskContext(paths[0], options, reachable, seed=0, eval_path=paths[1])


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def cached(tmp_path, hub_id, **splits):
    """A data set in the hub's cache, with a Parquet file of each split."""
    from datasets import Dataset

    folder = tmp_path / "hub" / f"datasets--{hub_id.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("0" * 40)
    (snapshot / "data").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    for split, rows in splits.items():
        Dataset.from_list(rows).to_parquet(snapshot / "data" / f"{split}-00000-of-00001.parquet")


def test_a_file_may_name_its_columns_as_it_likes_and_keeps_the_others(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"frage": "1 + 1?", "loesung": 2, "level": 3})
    data = Math().load(context(path, problem="frage", answer="loesung"))
    assert list(data.rows) == [{"frage": "1 + 1?", "loesung": 2, "level": 3, "problem": "1 + 1?", "answer": "2"}]
    assert (data.source, data.reason) == (f"1 rows of {path}", "data.path is set")


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"question": "q", "answer": "so it is\n#### 1,234"}, "1,234"),
        ({"problem": "q", "solution": r"Thus \boxed{1} or rather \boxed{\frac{1}{2}}."}, r"\frac{1}{2}"),
        ({"prompt": "q", "final_answer": 0.5}, "0.5"),
        ({"problem": "q", "answer": r"x \in \{1\}", "solution": "long"}, r"x \in \{1\}"),
    ],
)
def test_the_usual_names_and_forms_of_an_answer_are_found(tmp_path, row, answer):
    data = Math().load(context(write(tmp_path / "rows.jsonl", row)))
    assert data.rows[0]["answer"] == answer


@pytest.mark.parametrize(
    ("text", "held"),
    [(r"\boxed{a{b}c} \boxed{d", None), (r"\boxed{a{b}c}d", "a{b}c"), ("none", None), (r"\boxed{}", "")],
)
def test_the_last_box_is_read_with_its_braces_balanced(text, held):
    assert last_boxed(text) == held


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"text": "q", "answer": "2"}, {}, r":1: none of the columns problem, question.*data\.options\.problem"),
        ({"problem": "q"}, {}, r":1: none of the columns answer, .*the columns are problem; .*data\.options\.answer"),
        (ROW, {"answer": "result"}, r":1: the column 'result' \(data\.options\.answer\) is missing"),
        ({"problem": "q", "answer": ""}, {}, r":1: 'answer' is '', not a text"),
        ({"problem": "q", "answer": [2]}, {}, r":1: 'answer' is \[2\], not a text"),
        ({"problem": "q", "answer": r"\boxed{ }"}, {}, r":1: no answer is found"),
        (ROW, {"hub_id": "a/b"}, r"data\.path and data\.options\.hub_id are both set"),
        (ROW, {"hub": "a/b"}, r"no key 'hub' in this recipe; there are source, hub_id"),
        (ROW, {"answer": 3}, r"data\.options\.answer is 3, not a text"),
        (ROW, {"prompt": "long"}, r"data\.options\.prompt is 'long'; choose from auto, reason, short"),
    ],
)
def test_a_row_or_option_that_cannot_be_used_is_named(tmp_path, row, options, message):
    with pytest.raises(DataError, match=message):
        Math().load(context(write(tmp_path / "rows.jsonl", row), **options))


def test_held_out_rows_come_from_a_file_of_their_own(tmp_path):
    path, other = write(tmp_path / "a.jsonl", ROW), write(tmp_path / "b.jsonl", {**ROW, "problem": "other"})
    data = Math().load(context(path, other))
    assert [row["problem"] for row in data.eval_rows] == ["other"]
    with pytest.raises(DataError, match=r"set data\.path too"):
        Math().load(context(eval_path=other))


def test_a_data_set_of_the_hub_is_taken_from_the_cache_with_its_held_out_split(tmp_path):
    cached(tmp_path, "me/sums", train=[ROW] * 3, test=[ROW], validation=[ROW, ROW])
    asked = {"reachable": lambda: pytest.fail("asked the network"), "hub_id": "me/sums"}
    data = Math().load(context(**asked))
    assert (data.source, len(data.eval_rows)) == ("hub data set me/sums (3 rows)", 1)
    assert "cached" in data.reason
    assert len(Math().load(context(**asked, split="test", eval_split="validation")).eval_rows) == 2
    for split in ("split", "eval_split"):
        with pytest.raises(DataError, match="no split 'training'; there are train"):
            Math().load(context(**asked, **{split: "training"}))


def test_a_data_set_that_is_asked_for_by_name_is_never_replaced_by_another():
    with pytest.raises(DataError, match="the hub data set me/sums is not available: the hub is not reachable"):
        Math().load(context(hub_id="me/sums"))
    with pytest.raises(DataError, match=f"{HUB_ID} is not available"):
        Math().load(context(source="hub"))


def test_without_hub_problems_are_generated_and_the_first_lines_say_why():
    data = Math().load(context(train_rows=20, eval_rows=4))
    assert data.source.startswith("20 generated problems (shift, linear")
    assert f"{HUB_ID}: the hub is not reachable" in data.reason
    assert len(data.eval_rows) == 4


def test_generated_problems_are_shown_an_example_and_want_a_number_and_real_ones_are_asked_to_reason(tmp_path):
    generated, real = Math(), Math()
    data = generated.load(context(source="generated", kinds=["fractions"], train_rows=5, eval_rows=0))
    chat = generated.prompt(data.rows[0])
    assert [message["role"] for message in chat] == ["system", "user", "assistant", "user"]
    assert r"\boxed{\frac{3}{4}}" in chat[2]["content"]
    assert [path for _, path, weight in generated.rewards() if weight] == ["recipes.math.reward.math_verify_number"]

    real.load(context(write(tmp_path / "rows.jsonl", ROW)))
    system, question = real.prompt(ROW)
    assert r"\boxed" in system["content"]
    assert question["content"] == ROW["problem"]
    assert [path for _, path, weight in real.rewards() if weight] == ["recipes.math.reward.math_verify"]


def test_without_the_library_the_recipe_says_what_to_install(monkeypatch):
    monkeypatch.setattr(reward, "library", BoundedCalls("a_library_that_is_not_there"))
    with pytest.raises(DataError, match=r"No module named 'a_library_that_is_not_there'; `pip install 'math-verify"):
        Math().load(context(source="generated"))
