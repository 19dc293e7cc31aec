import json
from dataclasses import replace

import pytest

from generator.task import DataError, TaskContext
from recipes.gsm8k import GSM8K

ROW = {"question": "What is 2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}


@pytest.fixture(autouse=True)
def _empty_hub_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def context(path=None, reachable=lambda: False, **options) -> TaskContext:
    return TaskContext(str(path) if path else None, options, reachable, seed=0)


def write(path, *lines: str | bytes, end: bytes = b"\n"):
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + end for line in lines))
    return path


def test_a_data_file_comes_first_and_keeps_its_other_columns(tmp_path):
    path = write(tmp_path / "rows.jsonl", json.dumps(ROW | {"level": 3}), "", json.dumps(ROW))
    data = GSM8K().load(context(path, reachable=lambda: pytest.fail("asked the hub in spite of data.path")))
    assert list(data.rows) == [ROW | {"level": 3}, ROW]
    assert data.source == f"2 rows of {path}"
    assert data.reason == "data.path is set"


def test_a_byte_order_mark_windows_line_ends_and_unicode_separators_are_no_trouble(tmp_path):
    row = ROW | {"question": "Caf\N{LATIN SMALL LETTER E WITH ACUTE}\N{LINE SEPARATOR}2 + 3?"}
    lines = [json.dumps(row, ensure_ascii=False), json.dumps(ROW)]
    path = write(tmp_path / "rows.jsonl", b"\xef\xbb\xbf" + lines[0].encode(), lines[1], end=b"\r\n")
    assert list(GSM8K().load(context(path)).rows) == [row, ROW]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([json.dumps(ROW), '{"question": "q", '], r"rows\.jsonl:2: the line is not JSON"),
        ([json.dumps(ROW), "", "[1, 2]"], r"rows\.jsonl:3: the line is a JSON list"),
        (['{"question": "q", "solution": "s"}'], r":1: the column 'answer' is missing; the columns are question, sol"),
        (['{"question": ' + "1" * 5000 + "}"], r":1: the line cannot be read: Exceeds the limit"),
        (["{}"], r"'question' is missing; the columns are none"),
        (['{"question": "q", "answer": 5}'], r"'answer' is 5, not a text"),
        (['{"question": " ", "answer": "#### 5"}'], r"'question' is ' ', not a text"),
        (['{"question": "q", "answer": "five"}'], r":1: the answer does not contain '####'"),
        (['{"question": "q", "answer": "#### five"}'], r":1: the answer has no single number after '####'"),
        ([], r"is empty"),
        (["", "  "], r"is empty"),
        ([b"\xff\xfe\x00"], r"cannot be read: .*utf-8"),
    ],
)
def test_a_bad_data_file_is_refused_with_file_line_and_cause(tmp_path, lines, message):
    path = write(tmp_path / "rows.jsonl", *lines)
    with pytest.raises(DataError, match=message):
        GSM8K().load(context(path))


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(DataError, match=r"there is no file .*nothing\.jsonl"):
        GSM8K().load(context(tmp_path / "nothing.jsonl"))
    with pytest.raises(DataError, match="is a folder"):
        GSM8K().load(context(tmp_path))
    rows = write(tmp_path / "rows.jsonl", json.dumps(ROW))
    with pytest.raises(DataError, match=r"data\.eval_path: there is no file .*nothing\.jsonl"):
        GSM8K().load(replace(context(rows), eval_path=str(tmp_path / "nothing.jsonl")))


def test_without_hub_the_embedded_generator_is_taken_and_says_why():
    data = GSM8K().load(context(train_rows=20, eval_rows=4))
    assert data.source.startswith("embedded generator: 20 ")
    assert "openai/gsm8k: the hub is not reachable and the data set is not cached" in data.reason
    assert (len(data.rows), len(data.eval_rows)) == (20, 4)


def test_a_hub_data_set_in_the_cache_is_taken_without_asking_the_network(tmp_path):
    from datasets import Dataset

    snapshot = tmp_path / "hub" / "datasets--openai--gsm8k" / "snapshots" / ("0" * 40) / "main"
    snapshot.mkdir(parents=True)
    refs = tmp_path / "hub" / "datasets--openai--gsm8k" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    Dataset.from_list([ROW] * 3).to_parquet(snapshot / "train-00000-of-00001.parquet")
    Dataset.from_list([ROW]).to_parquet(snapshot / "test-00000-of-00001.parquet")
    data = GSM8K().load(context(reachable=lambda: pytest.fail("asked the network")))
    assert data.source == "hub data set openai/gsm8k (3 rows)"
    assert "cached" in data.reason
    assert list(data.eval_rows) == [ROW]


def test_a_hub_that_answers_and_then_fails_leads_to_the_generator_with_the_cause():
    data = GSM8K().load(context(reachable=lambda: True, train_rows=20, eval_rows=4))
    assert data.source.startswith("embedded generator")
    assert "fetching it failed" in data.reason


def test_the_hub_can_be_insisted_on_and_the_generator_can_be_chosen():
    with pytest.raises(DataError, match=r"set data\.path"):
        GSM8K().load(context(source="hub"))
    data = GSM8K().load(context(source="generated", reachable=lambda: pytest.fail("asked the hub")))
    assert data.reason == "data.options.source is generated; hub takes openai/gsm8k"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 2}, r"no key 'step' in this recipe; there are source, prompt, steps"),
        ({"source": "disk"}, r"data\.options\.source is 'disk'; choose from auto, hub, generated"),
        ({"prompt": "long"}, r"data\.options\.prompt is 'long'; choose from auto, reason, short"),
    ],
)
def test_a_wrong_option_is_refused_with_the_valid_ones(options, message):
    with pytest.raises(DataError, match=message):
        GSM8K().load(context(**options))


def test_real_problems_are_asked_with_reasoning_and_generated_ones_with_a_short_example(tmp_path):
    task = GSM8K()
    task.load(context(write(tmp_path / "rows.jsonl", json.dumps(ROW))))
    system, question = task.prompt(ROW)
    assert "step by step" in system["content"]
    assert "#### <number>" in system["content"]
    assert question == {"role": "user", "content": ROW["question"]}

    task.load(context(source="generated"))
    messages = task.prompt(ROW)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert "####" in messages[2]["content"]
    assert messages[-1] == question

    task.load(context(source="generated", prompt="reason"))
    assert task.prompt(ROW) == [system, question]


def test_the_default_rewards_exist_and_weigh_one_in_total():
    from importlib import import_module

    rewards = GSM8K().rewards()
    assert sum(weight for _, _, weight in rewards) == pytest.approx(1.0)
    for name, path, _ in rewards:
        module, _, function = path.rpartition(".")
        assert function == name
        assert callable(getattr(import_module(module), function))
