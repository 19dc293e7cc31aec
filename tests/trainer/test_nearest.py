import pytest

from trainer.checks import all_keys
from trainer.nearest import MOST, likeliest, nearest


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("stepss", ["steps"]),
        ("sampling.max_token", ["sampling.max_tokens"]),
        ("lr", ["optimizer.learning_rate"]),
        ("optimizer.lr", ["optimizer.learning_rate"]),
        ("sampling.learning_rate", ["optimizer.learning_rate"]),
        ("temperature", ["sampling.temperature", "evaluation.temperature"]),
    ],
)
def test_the_key_that_was_meant_is_found_and_all_where_several_are_as_likely(word, meant):
    assert likeliest(word, all_keys())[: len(meant)] == meant


def test_a_key_of_many_sections_names_some_of_them():
    found = likeliest("timeout", all_keys())
    assert 1 < len(found) <= MOST
    assert all(key.endswith(".timeout") for key in found)


def test_a_key_that_is_near_by_its_letters_comes_before_one_whose_last_part_is_the_same():
    assert likeliest("learner.rank", all_keys())[0] == "learner.ranks"


def test_nothing_close_is_not_made_up():
    assert nearest("zzzzzz", ["steps", "seed"]) == ""


def test_several_are_named_as_a_choice():
    both = "; did you mean `sampling.temperature` or `evaluation.temperature`?"
    assert nearest("temperature", all_keys()) == both
    assert nearest("seeed", ["seed", "steps"]) == "; did you mean `seed`?"
