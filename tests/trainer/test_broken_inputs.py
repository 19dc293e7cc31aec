"""Whatever is wrong with what a person brings is answered before anything heavy starts, by key, file or line."""

from __future__ import annotations

import random
import sys

import pytest

from tests.trainer.broken import Broken, answer, chat_model
from tests.trainer.broken_data import BOM, TEXT, arguments
from tests.trainer.broken_inputs import configurations, data_files
from tests.trainer.broken_values import mistyped, typed_keys
from trainer.checks import ConfigError
from trainer.compose import check_keys
from trainer.config import Config


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def place(tmp_path, monkeypatch, tmp_path_factory):
    """A folder to lay a broken input out in, from which its modules can be imported; they are forgotten afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.startswith("broken_"):
            del sys.modules[name]


def check_answer(broken: Broken, place, model):
    given, names = broken.lay_out(place, model)
    message = answer(given)
    assert message is not None, "it was taken for something that works"
    assert "\n" not in message
    assert len(message) < 2000
    assert [name for name in names if name not in message] == [], message


@pytest.mark.parametrize("broken", configurations(), ids=lambda broken: broken.what)
def test_a_broken_configuration_is_answered_by_what_is_wrong_with_it(broken, place, model):
    check_answer(broken, place, model)


@pytest.mark.parametrize("broken", data_files(), ids=lambda broken: broken.what)
def test_a_broken_data_file_is_answered_by_its_name_and_line(broken, place, model):
    check_answer(broken, place, model)


UNUSUAL = {
    "plain": TEXT.encode(),
    "a byte order mark": BOM + TEXT.encode(),
    "Windows line ends": TEXT.replace("\n", "\r\n").encode(),
    "both": BOM + TEXT.replace("\n", "\r\n").encode(),
    "line ends of an old Macintosh": TEXT.replace("\n", "\r").encode(),
    "no line end at the end": TEXT.rstrip("\n").encode(),
    "blank lines": TEXT.replace("\n", "\n\n").encode(),
    "line separators in a text": TEXT.replace("pens", "Stäbe \u2028 日本").encode(),
    "more columns": TEXT.replace('"answer"', '"more": [1, {"a": null}], "answer"').encode(),
}


@pytest.mark.parametrize("content", UNUSUAL.values(), ids=UNUSUAL.keys())
def test_a_file_that_only_looks_unusual_works(content, place, model):
    (place / "rows.jsonl").write_bytes(content)
    assert answer([word.replace("{model}", str(model)) for word in arguments(f"data.path={place}/rows.jsonl")]) is None


def test_every_key_without_one_of_its_letters_is_answered_with_the_key():
    rng = random.Random(0)
    for key, _ in typed_keys(Config):
        wrong = mistyped(key, rng)
        with pytest.raises(ConfigError) as failure:
            check_keys([f"{wrong}=1"])
        assert f"`{wrong}` is not a key" in str(failure.value)
        assert f"`{key}`" in str(failure.value)


def test_inputs_have_names_of_their_own_and_are_the_same_for_a_seed():
    for made in (configurations, data_files):
        assert len({broken.what for broken in made()}) == len(made())
        assert [broken.arguments for broken in made(3)] == [broken.arguments for broken in made(3)]
